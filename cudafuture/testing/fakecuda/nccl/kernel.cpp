#include "fakecuda/nccl/kernel.h"

#include <set>

#include "fakecuda/nccl/residency.h"

namespace fakenccl {

NcclKernel::NcclKernel(ncclComm* communicator, std::vector<NcclOperation> operations, bool captured)
    : communicator_(communicator), operations_(std::move(operations)) {
  if (!captured) ticket_ = communicator_->issue();
}

// A kernel that the machine dropped, after an error of the device, must not hold up the others. The machine may hold
// its lock here, so it is not woken; it tries the others within a millisecond anyway.
NcclKernel::~NcclKernel() {
  if (pending_) end();
}

bool NcclKernel::end() {
  tasks_.clear();
  const bool released = resident_ && release_channel(communicator_->device);
  resident_ = false;
  pending_ = false;
  return communicator_->retire(this, ticket_) || released;
}

bool NcclKernel::attempt() {
  bool moved = false;
  bool ended = false;
  {
    const std::lock_guard lock(communicator_->data_mutex);
    const auto segment = communicator_->segment.load();
    if (communicator_->ended || communicator_->revoked || segment == nullptr) {
      ended = true;
    } else if (may_run()) {
      // Test first which peers are gone. The data that a peer wrote before it died is then read below.
      std::vector<char> gone(communicator_->ranks);
      for (int peer = 0; peer < communicator_->ranks; ++peer) gone[peer] = communicator_->is_gone(peer);
      std::vector<int> waits_for;
      moved = advance(*segment, &waits_for);
      ended = done();
      for (const int peer : waits_for)
        if (!ended && gone[peer]) communicator_->set_async_error(ncclRemoteError, communicator_->why_gone(peer));
    }
  }
  if (moved) communicator_->ring_peers();
  if (ended && end()) fakecuda_wake();
  return ended;
}

// The kernels of one communicator run in the order of their launches, whatever their streams: NCCL orders them by a
// stream of its own.
bool NcclKernel::may_run() {
  if (!communicator_->begin(this, ticket_)) return false;
  pending_ = true;
  if (!resident_) resident_ = take_channel(communicator_->device);
  if (!resident_) return false;
  for (size_t i = tasks_.size(); i < operations_.size(); ++i)
    tasks_.push_back(operations_[i].point_to_point() ? make_message(operations_[i]) : make_collective(operations_[i]));
  return true;
}

bool NcclKernel::done() const {
  for (const auto& task : tasks_)
    if (!task->done()) return false;
  return true;
}

// Messages to and from different peers progress concurrently; those between the same two ranks, and collectives, one
// after the other (NCCL user guide, Group Calls, Point-to-point communication).
bool NcclKernel::advance(Segment& segment, std::vector<int>* waits_for) {
  bool moved_at_all = false;
  for (bool moved = true; moved;) {
    moved = false;
    waits_for->clear();
    std::set<std::pair<int, int>> busy;  // directions in which an earlier operation is not done
    for (size_t i = 0; i < tasks_.size(); ++i) {
      const NcclOperation& operation = operations_[i];
      const int way = operation.point_to_point() ? 1 + (operation.kind == NcclOperationKind::send) : 0;
      const std::pair<int, int> direction{way, way == 0 ? 0 : operation.root};
      if (tasks_[i]->done() || busy.count(direction) != 0) continue;
      std::vector<int> waits;
      if (tasks_[i]->advance(*communicator_, segment, &waits)) moved = true;
      if (tasks_[i]->done()) continue;
      busy.insert(direction);
      waits_for->insert(waits_for->end(), waits.begin(), waits.end());
    }
    moved_at_all = moved_at_all || moved;
  }
  return moved_at_all;
}

void launch(ncclComm* communicator, std::vector<NcclOperation> operations, cudaStream_t stream, bool captured) {
  std::vector<MemoryAccess> accesses;
  for (const NcclOperation& operation : operations)
    for (const MemoryAccess& access : accesses_of(operation, communicator->rank, communicator->ranks))
      accesses.push_back(access);
  const std::string name = "nccl" + describe(operations.front().descriptor()) + (operations.size() > 1 ? " ..." : "");
  const auto kernel = std::make_shared<NcclKernel>(communicator, std::move(operations), captured);
  fakecuda_launch_until(stream, name.c_str(), std::move(accesses), [kernel] { return kernel->attempt(); });
}

}  // namespace fakenccl
