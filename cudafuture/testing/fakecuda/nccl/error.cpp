#include "fakecuda/nccl/error.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

namespace fakenccl {
namespace {

std::atomic<bool> used{false};
std::atomic<bool> forked{false};

struct LastError {
  std::mutex mutex;
  std::string message;
};

// The objects of the process are never destroyed: threads use them until the process has ended.
LastError& last() {
  static auto* const error = new LastError;
  return *error;
}

const int at_fork = pthread_atfork(nullptr, nullptr, [] { forked = used.load(); });

}  // namespace

ncclResult_t fail(ncclResult_t result, const std::string& message) {
  {
    const std::lock_guard lock(last().mutex);
    last().message = message;
  }
  const char* debug = getenv("NCCL_DEBUG");
  if (debug != nullptr && *debug != 0) fprintf(stderr, "fakenccl [%d]: %s\n", getpid(), message.c_str());
  return result;
}

std::string last_error() {
  const std::lock_guard lock(last().mutex);
  return last().message;
}

void report(int rank, const std::string& message) {
  fprintf(stderr, "fakenccl [%d] rank %d: %s\n", getpid(), rank, message.c_str());
}

ncclResult_t check_not_forked() {
  if (!forked) {
    used = true;
    return ncclSuccess;
  }
  // The lock of the last message may be held by a thread that the child does not have, so no message is kept.
  fprintf(stderr,
          "fakenccl [%d]: NCCL was called in a child of a process that had used NCCL. Start it with spawn instead.\n",
          getpid());
  return ncclInvalidUsage;
}

}  // namespace fakenccl
