// The group of a thread: what it issues between ncclGroupStart and ncclGroupEnd (NCCL user guide, Group Calls).
#pragma once

#include <functional>

#include "fakecuda/nccl/operation.h"

namespace fakenccl {

// Issue an operation: now, or when the thread's group ends.
ncclResult_t issue(ncclComm_t communicator, NcclOperation operation, cudaStream_t stream);

// Run a job that waits for other ranks: now, or together with the others of the thread's group when that ends.
ncclResult_t issue(ncclComm_t communicator, std::function<ncclResult_t()> job);

ncclResult_t start_group();
// End the innermost group. The outermost launches everything, unless `simulate` is set.
ncclResult_t end_group(bool simulate);

// Remember an error of a call inside the thread's group: ncclGroupEnd returns it and launches nothing.
ncclResult_t note(ncclResult_t result);

}  // namespace fakenccl
