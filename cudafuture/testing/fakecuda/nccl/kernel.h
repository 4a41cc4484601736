// A kernel: the operations of one communicator that one call or one group launches together.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "fakecuda/nccl/operation.h"

namespace fakenccl {

class NcclKernel {
 public:
  // A captured kernel has no place among the communicator's other kernels: a graph runs it, and may do so repeatedly.
  NcclKernel(ncclComm* communicator, std::vector<NcclOperation> operations, bool captured);
  ~NcclKernel();
  NcclKernel(const NcclKernel&) = delete;

  // Make progress. Return true when the kernel has ended.
  bool attempt();

 private:
  bool may_run();
  bool advance(Segment& segment, std::vector<int>* waits_for);
  bool done() const;
  // Release what the kernel holds. Return whether another kernel may wait for that.
  bool end();

  ncclComm* communicator_;
  std::vector<NcclOperation> operations_;
  uint64_t ticket_ = 0;  // 0 for a captured kernel
  bool pending_ = true;
  bool resident_ = false;
  std::vector<std::unique_ptr<RunningOperation>> tasks_;
};

// Launch the operations on a stream of the communicator's device.
void launch(ncclComm* communicator, std::vector<NcclOperation> operations, cudaStream_t stream, bool captured);

}  // namespace fakenccl
