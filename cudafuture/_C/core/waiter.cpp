#include "core/waiter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace cudafuture {
namespace {

static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "a futex is one plain word");

}  // namespace

bool Waiter::wait(const Clock::time_point* deadline) noexcept {
  timespec until{};
  if (deadline != nullptr) {  // steady_clock is CLOCK_MONOTONIC, the clock of FUTEX_WAIT_BITSET
    // The kernel refuses times before the clock's epoch.
    const auto epoch = std::max(deadline->time_since_epoch(), Clock::duration::zero());
    const auto t = std::chrono::duration_cast<std::chrono::nanoseconds>(epoch).count();
    until = {t / 1'000'000'000, t % 1'000'000'000};
  }
  while (released_.load(std::memory_order_acquire) == 0) {
    const long error = syscall(SYS_futex, &released_, FUTEX_WAIT_BITSET_PRIVATE, 0,
                               deadline == nullptr ? nullptr : &until, nullptr, FUTEX_BITSET_MATCH_ANY);
    if (error != 0 && errno == ETIMEDOUT) return released_.load(std::memory_order_acquire) != 0;
  }
  return true;
}

void Waiter::release() noexcept {
  std::atomic<std::uint32_t>* const word = &released_;
  word->store(1, std::memory_order_release);
  // From here on only the address is used: a wake without a waiter, or of a waiter that checks again, is harmless.
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

}  // namespace cudafuture
