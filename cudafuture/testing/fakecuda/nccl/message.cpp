// Point-to-point messages: the sender and the receiver write their descriptors, and bytes go through a ring.
//
// Both ends wait for each other even where the message would fit into the ring: NCCL promises no buffering, so a
// program that relies on it hangs here (NCCL user guide, Point-to-point communication; ncclSend is blocking for the
// GPU).
#include <string.h>

#include <algorithm>

#include "fakecuda/nccl/operation.h"

namespace fakenccl {
namespace {

class NcclMessage : public RunningOperation {
 public:
  explicit NcclMessage(const NcclOperation& operation) : operation_(operation) {}

  bool advance(ncclComm& communicator, Segment& segment, std::vector<int>* waits_for) override;
  bool done() const override { return done_; }

 private:
  bool announce(ncclComm& communicator, PairSlot& pair);
  bool move(Segment& segment, PairSlot& pair);
  bool agrees(ncclComm& communicator, const PairSlot& pair);
  bool sends() const { return operation_.kind == NcclOperationKind::send; }

  NcclOperation operation_;
  bool announced_ = false;
  bool matched_ = false;
  bool failed_ = false;
  bool done_ = false;
  uint64_t number_ = 0;  // of the message from this sender to this receiver
  size_t moved_ = 0;
};

bool NcclMessage::announce(ncclComm& communicator, PairSlot& pair) {
  announced_ = true;
  number_ = (sends() ? communicator.next_send : communicator.next_receive)[operation_.root]++;
  (sends() ? pair.send_descriptors : pair.receive_descriptors)[number_ % 2] = operation_.descriptor();
  (sends() ? pair.sends : pair.receives).store(number_ + 1);
  return true;
}

bool NcclMessage::agrees(ncclComm& communicator, const PairSlot& pair) {
  const Descriptor own = operation_.descriptor();
  const Descriptor theirs = (sends() ? pair.receive_descriptors : pair.send_descriptors)[number_ % 2];
  if (own.count == theirs.count && own.type == theirs.type) return true;
  report_mismatch(communicator, communicator.rank, own, operation_.root, theirs);
  return false;
}

bool NcclMessage::move(Segment& segment, PairSlot& pair) {
  const size_t total = operation_.bytes();
  const uint64_t written = pair.written.load();
  const uint64_t read = pair.read.load();
  if (sends() && moved_ == total) {
    done_ = read == written;  // the receiver has all of it
    return done_;
  }
  const uint64_t position = sends() ? written : read;
  size_t size = std::min<size_t>(sends() ? kRingSize - (written - read) : written - read, total - moved_);
  size = std::min<size_t>(size, kRingSize - position % kRingSize);
  const int from = sends() ? segment.rank() : operation_.root;
  const int to = sends() ? operation_.root : segment.rank();
  char* place = segment.ring(from, to) + position % kRingSize;
  if (size != 0) {
    if (sends())
      memcpy(place, fakecuda_host_pointer(static_cast<const char*>(operation_.send) + moved_, size), size);
    else
      memcpy(fakecuda_host_pointer(static_cast<char*>(operation_.receive) + moved_, size), place, size);
    (sends() ? pair.written : pair.read).store(position + size);
    moved_ += size;
  }
  if (!sends() && moved_ == total) return done_ = true;
  return size != 0;
}

bool NcclMessage::advance(ncclComm& communicator, Segment& segment, std::vector<int>* waits_for) {
  if (done_ || failed_) return false;
  PairSlot& pair =
      sends() ? segment.pair(segment.rank(), operation_.root) : segment.pair(operation_.root, segment.rank());
  bool moved = !announced_ && announce(communicator, pair);
  if (!matched_ && (sends() ? pair.receives : pair.sends).load() > number_) {
    matched_ = agrees(communicator, pair);
    failed_ = !matched_;
    moved = true;
  }
  while (matched_ && !done_ && move(segment, pair)) moved = true;
  if (!done_ && !failed_) waits_for->push_back(operation_.root);
  return moved;
}

}  // namespace

std::unique_ptr<RunningOperation> make_message(const NcclOperation& operation) {
  return std::make_unique<NcclMessage>(operation);
}

}  // namespace fakenccl
