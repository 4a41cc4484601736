// Collectives: each rank publishes its contribution in chunks, and each rank takes from all chunks what it needs.
//
//   rank 0   publish 0   publish 1   consume 0   publish 2 ...     Chunk i lies at i % 2 of the rank's place, so it is
//   rank 1   publish 0   consume 0   publish 1   consume 1 ...     written when all ranks have consumed chunk i - 2.
//
// A rank consumes a chunk when all ranks have published it and their descriptors agree. With a mismatch no rank
// consumes the first chunk, so none overwrites its descriptor and all ranks see the difference.
#include <string.h>

#include <algorithm>

#include "fakecuda/nccl/operation.h"

namespace fakenccl {
namespace {

class Collective : public RunningOperation {
 public:
  explicit Collective(const NcclOperation& operation) : operation_(operation) {}

  bool advance(ncclComm& communicator, Segment& segment, std::vector<int>* waits_for) override;
  bool done() const override { return begun_ && consumed_ == rounds_; }

 private:
  void begin(ncclComm& communicator, Segment& segment);
  bool publish(Segment& segment, std::vector<int>* waits_for);
  bool consume(ncclComm& communicator, Segment& segment, std::vector<int>* waits_for);
  bool agrees(ncclComm& communicator, Segment& segment);
  bool contributes(int rank) const;
  void fill(Segment& segment, uint64_t round);
  void take(Segment& segment, uint64_t round);
  void take_reduced(Segment& segment, uint64_t chunk, size_t size, size_t offset, size_t to);

  NcclOperation operation_;
  bool begun_ = false;
  bool failed_ = false;
  uint64_t base_ = 0;  // the number of the first chunk
  uint64_t rounds_ = 0;
  uint64_t published_ = 0;
  uint64_t consumed_ = 0;
  size_t total_ = 0;  // of the bytes that a rank contributes
  size_t block_ = 0;  // of the bytes of one rank in it, where it is scattered
};

bool Collective::contributes(int rank) const {
  const bool from_root =
      operation_.kind == NcclOperationKind::broadcast || operation_.kind == NcclOperationKind::scatter;
  return !from_root || operation_.root == rank;
}

void Collective::begin(ncclComm& communicator, Segment& segment) {
  begun_ = true;
  block_ = operation_.bytes();
  const NcclOperationKind kind = operation_.kind;
  const bool scattered = kind == NcclOperationKind::reduce_scatter || kind == NcclOperationKind::all_to_all ||
                         kind == NcclOperationKind::scatter;
  total_ = scattered ? block_ * segment.ranks() : block_;
  rounds_ = (total_ + kChunkSize - 1) / kChunkSize;
  base_ = communicator.next_chunk;
  communicator.next_chunk += rounds_;
  if (operation_.reduction.on_device == nullptr) return;
  const size_t size = size_of(operation_.type);
  memcpy(operation_.reduction.scalar, fakecuda_host_pointer(operation_.reduction.on_device, size), size);
}

bool Collective::advance(ncclComm& communicator, Segment& segment, std::vector<int>* waits_for) {
  if (!begun_) begin(communicator, segment);
  bool moved = false;
  while (!failed_ && !done()) {
    waits_for->clear();
    const bool published = publish(segment, waits_for);
    const bool consumed = consume(communicator, segment, waits_for);
    if (!published && !consumed) break;
    moved = true;
  }
  return moved;
}

bool Collective::publish(Segment& segment, std::vector<int>* waits_for) {
  if (published_ == rounds_) return false;
  const uint64_t number = base_ + published_;
  bool free = true;
  for (int peer = 0; peer < segment.ranks(); ++peer) {
    if (segment.slot(peer).consumed.load() + 1 >= number) continue;
    waits_for->push_back(peer);
    free = false;
  }
  if (!free) return false;
  RankSlot& slot = segment.own();
  slot.descriptors[number % 2] = operation_.descriptor();
  if (contributes(segment.rank())) fill(segment, published_);
  slot.published.store(number + 1);
  ++published_;
  return true;
}

bool Collective::consume(ncclComm& communicator, Segment& segment, std::vector<int>* waits_for) {
  if (consumed_ == published_) return false;
  const uint64_t number = base_ + consumed_;
  bool complete = true;
  for (int peer = 0; peer < segment.ranks(); ++peer) {
    if (segment.slot(peer).published.load() > number) continue;
    waits_for->push_back(peer);
    complete = false;
  }
  if (consumed_ == 0 && !agrees(communicator, segment)) return false;
  if (!complete) return false;
  take(segment, consumed_);
  ++consumed_;
  segment.own().consumed.store(number + 1);
  return true;
}

// Compare the first chunk's descriptors of the ranks that have published it.
bool Collective::agrees(ncclComm& communicator, Segment& segment) {
  const Descriptor own = operation_.descriptor();
  for (int peer = 0; peer < segment.ranks(); ++peer) {
    if (segment.slot(peer).published.load() <= base_) continue;
    const Descriptor& theirs = segment.slot(peer).descriptors[base_ % 2];
    if (memcmp(&own, &theirs, sizeof own) == 0) continue;
    report_mismatch(communicator, segment.rank(), own, peer, theirs);
    failed_ = true;
    return false;
  }
  return true;
}

void Collective::fill(Segment& segment, uint64_t round) {
  const size_t offset = round * kChunkSize;
  const size_t size = std::min(kChunkSize, total_ - offset);
  const void* from = fakecuda_host_pointer(static_cast<const char*>(operation_.send) + offset, size);
  char* to = segment.chunk(segment.rank(), base_ + round);
  if (operation_.reduction.op < ncclNumOps)
    memcpy(to, from, size);
  else
    scale(to, from, size / size_of(operation_.type), operation_.type, operation_.reduction.scalar);
}

void Collective::take(Segment& segment, uint64_t round) {
  const uint64_t chunk = base_ + round;
  const size_t offset = round * kChunkSize;
  const size_t size = std::min(kChunkSize, total_ - offset);
  const bool root = operation_.root == segment.rank();
  auto* out = static_cast<char*>(operation_.receive);
  const auto copy = [&](int from, size_t skip, size_t length, size_t to) {
    memcpy(fakecuda_host_pointer(out + to, length), segment.chunk(from, chunk) + skip, length);
  };
  // The part of the chunk that belongs to this rank's block, where blocks are scattered.
  const size_t first = std::max(offset, block_ * segment.rank());
  const size_t last = std::min(offset + size, block_ * (segment.rank() + 1));
  switch (operation_.kind) {
    case NcclOperationKind::reduce:
      if (!root) return;
      [[fallthrough]];
    case NcclOperationKind::all_reduce:
      return take_reduced(segment, chunk, size, 0, offset);
    case NcclOperationKind::broadcast:
      return copy(operation_.root, 0, size, offset);
    case NcclOperationKind::gather:
      if (!root) return;
      [[fallthrough]];
    case NcclOperationKind::all_gather:
      for (int peer = 0; peer < segment.ranks(); ++peer) copy(peer, 0, size, peer * block_ + offset);
      return;
    default:
      break;
  }
  if (first >= last) return;
  const size_t inside = first - block_ * segment.rank();
  if (operation_.kind == NcclOperationKind::reduce_scatter)
    return take_reduced(segment, chunk, last - first, first - offset, inside);
  if (operation_.kind == NcclOperationKind::scatter) return copy(operation_.root, first - offset, last - first, inside);
  for (int peer = 0; peer < segment.ranks(); ++peer) copy(peer, first - offset, last - first, peer * block_ + inside);
}

void Collective::take_reduced(Segment& segment, uint64_t chunk, size_t size, size_t offset, size_t to) {
  std::vector<const void*> inputs;
  for (int peer = 0; peer < segment.ranks(); ++peer) inputs.push_back(segment.chunk(peer, chunk) + offset);
  void* out = fakecuda_host_pointer(static_cast<char*>(operation_.receive) + to, size);
  reduce(out, inputs, size / size_of(operation_.type), operation_.type, operation_.reduction.op);
}

}  // namespace

std::unique_ptr<RunningOperation> make_collective(const NcclOperation& operation) {
  return std::make_unique<Collective>(operation);
}

}  // namespace fakenccl
