// A thread that waits, on its own stack, to be released once; or, in a derived class, something else that a completion
// releases directly.
//
// One futex word: a mutex and a condition variable cost a second hand-over between the two threads, which shows in the
// latency of wait(), and libstdc++'s semaphores can sleep for ever before GCC 12.3 (bug 104928).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace cudafuture {

class Waiter {
 public:
  using Clock = std::chrono::steady_clock;

  Waiter() = default;
  virtual ~Waiter() = default;
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // Blocks until it is released or the deadline (null: none) has come. Returns whether it was released.
  bool wait(const Clock::time_point* deadline) noexcept;

  // The waiter may be gone as soon as this is called; read `next` before.
  virtual void release() noexcept;

  Waiter* next = nullptr;  // guarded by the lock of whoever keeps the list

 private:
  std::atomic<std::uint32_t> released_{0};
};

}  // namespace cudafuture
