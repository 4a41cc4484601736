// Results of the library and the message of the last error.
#pragma once

#include <string>

#include "fakecuda/nccl/declarations.h"

namespace fakenccl {

// Remember `message` for ncclGetLastError and return `result`. With NCCL_DEBUG set the message also goes to stderr
// (NCCL user guide, Environment Variables, NCCL_DEBUG).
ncclResult_t fail(ncclResult_t result, const std::string& message);

// Return the message of the last error of the process.
std::string last_error();

// Print a line about rank `rank` to stderr.
void report(int rank, const std::string& message);

// Note that the process uses NCCL. Return ncclInvalidUsage in a child of a process that had used NCCL before the fork,
// and ncclSuccess elsewhere. Such a child has none of the threads and no CUDA context of its parent, so NCCL cannot be
// used in it.
ncclResult_t check_not_forked();

}  // namespace fakenccl
