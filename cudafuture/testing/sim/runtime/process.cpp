#include "sim/runtime/process.h"

#include <pthread.h>

#include <atomic>
#include <stdexcept>

namespace sim {
namespace {

std::atomic<bool> watched{false};
std::atomic<bool> forked{false};

}  // namespace

void watch_forks() noexcept {
  if (watched.exchange(true)) return;
  pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
}

bool is_forked_child() noexcept { return forked.load(std::memory_order_relaxed); }

void refuse_after_fork() {
  if (!is_forked_child()) return;
  throw std::runtime_error(
      "the simulated accelerator cannot be used in a forked child of a process that had used it; start this process "
      "with the 'spawn' or 'forkserver' method");
}

}  // namespace sim
