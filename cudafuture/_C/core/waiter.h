// A thread, waiting on its own stack, that is released once. A derived class releases something else directly on
// completion.
//
// It uses one futex word. A mutex and a condition variable cost a second hand-over between the two threads, which shows
// in the latency of wait(). libstdc++'s semaphores can sleep forever before GCC 12.3 (bug 104928).
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

  // Blocks until the waiter is released or the deadline (null: none) is reached. Returns true if it was released.
  bool wait(const Clock::time_point* deadline) noexcept;

  // Releases the waiter. It may be destroyed as soon as this is called; read `next` before.
  virtual void release() noexcept;

  Waiter* next = nullptr;  // guarded by the lock of the list's owner

 private:
  std::atomic<std::uint32_t> released_{0};
};

}  // namespace cudafuture
