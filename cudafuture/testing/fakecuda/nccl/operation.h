// An operation as the program issues it, and the part of a kernel that carries it out.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <vector>

#include "fakecuda/devices/launch.h"
#include "fakecuda/nccl/communicator.h"

namespace fakenccl {

using machine::MemoryAccess;

enum class NcclOperationKind : int32_t {
  all_reduce,
  broadcast,
  reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  gather,
  scatter,
  send,
  receive
};

struct NcclOperation {
  NcclOperationKind kind = NcclOperationKind::all_reduce;
  const void* send = nullptr;
  void* receive = nullptr;
  size_t count = 0;
  ncclDataType_t type = ncclFloat32;
  Reduction reduction;
  int root = 0;  // or the peer of a send or receive
  uint64_t number = 0;
  uint64_t discarded = 0;

  size_t bytes() const { return count * size_of(type); }
  bool point_to_point() const { return kind == NcclOperationKind::send || kind == NcclOperationKind::receive; }
  Descriptor descriptor() const;
};

// Return the operation of a descriptor in words: "AllReduce(count=4, type=float32, reduction=sum)".
std::string describe(const Descriptor& descriptor);

// Return the memory that an operation reads and writes on a rank.
std::vector<MemoryAccess> accesses_of(const NcclOperation& operation, int rank, int ranks);

// One operation while its kernel runs.
class RunningOperation {
 public:
  virtual ~RunningOperation() = default;
  // Do what can be done without waiting. Return whether anything was done; otherwise add the ranks that the task waits
  // for to `waits_for`.
  virtual bool advance(ncclComm& communicator, Segment& segment, std::vector<int>* waits_for) = 0;
  virtual bool done() const = 0;
};

std::unique_ptr<RunningOperation> make_collective(const NcclOperation& operation);
std::unique_ptr<RunningOperation> make_message(const NcclOperation& operation);

// Make a difference between the descriptors of two ranks the communicator's error.
void report_mismatch(ncclComm& communicator, int rank, const Descriptor& own, int peer, const Descriptor& theirs);

}  // namespace fakenccl
