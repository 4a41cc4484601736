#include "fakecuda/nccl/communicator.h"

#include <cuda_runtime_api.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <unordered_set>

#include "fakecuda/devices/launch.h"
#include "fakecuda/nccl/error.h"
#include "fakecuda/nccl/process.h"

using namespace fakenccl;

namespace {

// The communicators of the process.
struct Communicators {
  std::mutex mutex;
  std::unordered_set<ncclComm*> handles;           // all that ever were
  std::vector<std::shared_ptr<Segment>> segments;  // of those that are in use
};

Communicators& registry() {
  static auto* const object = new Communicators;
  return *object;
}

// A peer has made progress, or has died: the machine tries the kernels that wait.
void woken() {
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& segment : registry().segments) segment->own().rung.store(0);
  }
  fakecuda_wake();
}

void forget_segment(const std::shared_ptr<Segment>& segment) {
  const std::lock_guard lock(registry().mutex);
  std::erase(registry().segments, segment);
}

void pause_shortly() {
  const timespec pause{0, 200000};
  nanosleep(&pause, nullptr);
}

}  // namespace

ncclResult_t fakenccl::check_handle(ncclComm_t communicator) {
  if (const ncclResult_t result = check_not_forked(); result != ncclSuccess) return result;
  const std::lock_guard lock(registry().mutex);
  if (registry().handles.count(communicator) != 0) return ncclSuccess;
  return fail(ncclInvalidArgument,
              communicator == nullptr ? "The communicator is NULL." : "There is no such communicator.");
}

ncclComm::ncclComm(bool blocking) : blocking(blocking) {
  cudaGetDevice(&device);
  cudaFree(nullptr);  // NCCL makes a context on the device
  char text[32] = "";
  cudaDeviceGetPCIBusId(text, sizeof text, device);
  bus_id = text;
  const std::lock_guard lock(registry().mutex);
  registry().handles.insert(this);
}

ncclResult_t ncclComm::initialise(const std::string& segment_name, int of_ranks, int own_rank) {
  start_doorbell(woken);
  name = segment_name;
  ranks = of_ranks;
  rank = own_rank;
  for (auto* counters : {&next_send, &next_receive, &sends_issued, &receives_issued}) counters->resize(ranks);
  dead_.reset(new std::atomic<bool>[ranks]);
  for (int peer = 0; peer < ranks; ++peer) dead_[peer] = false;
  const ncclResult_t result = join(segment_name);
  if (result != ncclSuccess) set_async_error(result, last_error());
  const std::lock_guard lock(state_mutex_);
  starting_ = false;
  return result;
}

ncclResult_t ncclComm::join(const std::string& segment_name) {
  ncclResult_t result;
  const auto joined = Segment::attach(segment_name, ranks, rank, bus_id, &result);
  if (result == ncclSuccess) result = joined->wait_for_ranks([this] { return ended.load(); });
  if (result != ncclSuccess) return result;
  {
    const std::lock_guard lock(data_mutex);
    if (ended) return fail(ncclInternalError, "The communicator was aborted while it was initialised.");
    segment.store(joined);
    const std::lock_guard registry_lock(registry().mutex);
    registry().segments.push_back(joined);
  }
  watch_peers();
  return ncclSuccess;
}

// Peers notice the death of a process, as NCCL's proxies do when a socket breaks.
void ncclComm::watch_peers() {
  const auto shared = segment.load();
  for (int peer = 0; shared != nullptr && peer < ranks; ++peer) {
    const RankSlot& slot = shared->slot(peer);
    if (slot.pid == getpid()) continue;
    const uint64_t token = watch(slot.pid, slot.started, [this, peer] { dead_[peer] = true; });
    const std::lock_guard lock(state_mutex_);
    watches_.push_back(token);
  }
}

ncclResult_t ncclComm::run_job(std::function<ncclResult_t()> job) {
  if (blocking) return job();
  {
    const std::lock_guard lock(state_mutex_);
    job_runs_ = true;
  }
  std::thread([this, job = std::move(job)] {
    const ncclResult_t result = job();
    const std::lock_guard lock(state_mutex_);
    job_runs_ = false;
    if (result != ncclSuccess && error_ == ncclSuccess) error_ = result, message_ = last_error();
    changed_.notify_all();
  }).detach();
  return ncclInProgress;
}

ncclResult_t ncclComm::wait_for_messages(const Segment& shared, bool (*enough)(const RankSlot&, uint64_t),
                                         uint64_t number) {
  for (int peer = 0; peer < ranks; ++peer) {
    while (!enough(shared.slot(peer), number)) {
      const bool last_look = is_gone(peer);
      if (enough(shared.slot(peer), number)) break;
      if (last_look) return fail(ncclRemoteError, why_gone(peer));
      if (ended) return fail(ncclInternalError, "The communicator was aborted.");
      pause_shortly();
    }
  }
  return ncclSuccess;
}

ncclResult_t ncclComm::exchange(const HostMessage& own, std::vector<HostMessage>* all) {
  const auto shared = segment.load();
  if (shared == nullptr) return fail(ncclInvalidUsage, "The communicator was destroyed or aborted.");
  const uint64_t number = host_messages_++;
  RankSlot& slot = shared->own();
  // A message is overwritten by the second one after it, so all ranks must have heard the one between.
  ncclResult_t result =
      wait_for_messages(*shared, [](const RankSlot& peer, uint64_t n) { return peer.heard.load() + 1 >= n; }, number);
  if (result != ncclSuccess) return result;
  slot.messages[number % 2] = own;
  slot.told.store(number + 1);
  result = wait_for_messages(*shared, [](const RankSlot& peer, uint64_t n) { return peer.told.load() > n; }, number);
  if (result != ncclSuccess) return result;
  for (int peer = 0; peer < ranks; ++peer) all->push_back(shared->slot(peer).messages[number % 2]);
  slot.heard.store(number + 1);
  return ncclSuccess;
}

ncclResult_t ncclComm::check_usable() {
  if (ended) return fail(ncclInvalidArgument, "The communicator was destroyed or aborted.");
  if (revoked)
    return fail(ncclInvalidUsage, "The communicator was shrunk with NCCL_SHRINK_ABORT. Destroy or abort it.");
  const std::lock_guard lock(state_mutex_);
  if (starting_ || job_runs_)
    return fail(ncclInvalidArgument,
                "The communicator is in progress. Wait until ncclCommGetAsyncError tells ncclSuccess.");
  return error_ == ncclSuccess ? ncclSuccess : fail(error_, message_);
}

// NCCL user guide, Fault Tolerance and Asynchronous Error Handling: ncclCommGetAsyncError tells of an error of the
// network or of a peer; ncclInProgress stands for a call of a non-blocking communicator that has not ended.
ncclResult_t ncclComm::async_error() {
  bool settled;
  {
    const std::lock_guard lock(state_mutex_);
    if (error_ != ncclSuccess) return error_;
    if (ended) return ncclInvalidUsage;
    if (starting_ || job_runs_) return ncclInProgress;
    settled = idle_locked();
  }
  // A pending kernel may still end well: its peer may have died after it sent all. The kernel itself tells.
  const auto shared = segment.load();
  for (int peer = 0; settled && shared != nullptr && peer < ranks; ++peer)
    if (dead_[peer] && shared->slot(peer).membership.load() == Membership::joined)
      set_async_error(ncclRemoteError, why_gone(peer));
  const std::lock_guard lock(state_mutex_);
  return error_;
}

void ncclComm::set_async_error(ncclResult_t error, const std::string& message) {
  fail(error, message);
  const std::lock_guard lock(state_mutex_);
  if (error_ != ncclSuccess) return;
  error_ = error;
  message_ = message;
  report(rank, message);
}

std::string ncclComm::error_message() {
  const std::lock_guard lock(state_mutex_);
  return error_ == ncclSuccess ? last_error() : message_;
}

bool ncclComm::is_gone(int peer) const {
  const auto shared = segment.load();
  if (shared == nullptr || peer == rank) return false;
  return dead_[peer] || shared->slot(peer).membership.load() != Membership::joined;
}

std::string ncclComm::why_gone(int peer) const {
  const auto shared = segment.load();
  if (shared == nullptr) return "The communicator has ended.";
  const std::string who = "Rank " + std::to_string(peer) + " (process " + std::to_string(shared->slot(peer).pid) + ")";
  switch (shared->slot(peer).membership.load()) {
    case Membership::left:
      return who + " has destroyed its communicator.";
    case Membership::aborted:
      return who + " has aborted its communicator.";
    default:
      return who + " has died.";
  }
}

uint64_t ncclComm::issue() {
  const std::lock_guard lock(state_mutex_);
  return ++issued_;
}

bool ncclComm::begin(const void* kernel, uint64_t ticket) {
  const std::lock_guard lock(state_mutex_);
  if (running_ == kernel) return true;
  if (running_ != nullptr || (ticket != 0 && ticket != first_)) return false;
  running_ = kernel;
  return true;
}

bool ncclComm::retire(const void* kernel, uint64_t ticket) {
  const std::lock_guard lock(state_mutex_);
  if (running_ == kernel) running_ = nullptr;
  if (ticket != 0) retired_.insert(ticket);
  while (retired_.erase(first_) != 0) ++first_;
  changed_.notify_all();
  return first_ <= issued_;
}

// As NCCL's destruction and finalisation do, this waits for what was issued, without a limit (NCCL user guide,
// Finalizing a communicator).
ncclResult_t ncclComm::wait_kernels() {
  std::unique_lock lock(state_mutex_);
  changed_.wait(lock, [this] { return idle_locked() || ended.load(); });
  return ncclSuccess;
}

ncclResult_t ncclComm::wait_idle() {
  std::unique_lock lock(state_mutex_);
  changed_.wait(lock, [this] { return (idle_locked() && !job_runs_) || ended.load(); });
  return ncclSuccess;
}

void ncclComm::leave(Membership how) {
  std::vector<uint64_t> watches;
  {
    // Kernels hold this lock while they touch the program's memory, so none does after the call.
    const std::lock_guard data_lock(data_mutex);
    if (ended.exchange(true)) return;
    const std::lock_guard lock(state_mutex_);
    watches.swap(watches_);
    changed_.notify_all();
  }
  for (const uint64_t token : watches) unwatch(token);
  if (const auto shared = segment.load(); shared != nullptr) {
    shared->own().membership.store(how);
    ring_peers();
    forget_segment(shared);
    segment.store(nullptr);
  }
  fakecuda_wake();
}

void ncclComm::ring_peers() {
  const auto shared = segment.load();
  if (shared == nullptr) return;
  bool here = false;
  for (int peer = 0; peer < ranks; ++peer) {
    RankSlot& slot = shared->slot(peer);
    if (peer == rank) continue;
    if (slot.pid == getpid())
      here = true;
    else if (slot.rung.exchange(1) == 0)
      ring(slot.pid, slot.started);
  }
  if (here) fakecuda_wake();
}
