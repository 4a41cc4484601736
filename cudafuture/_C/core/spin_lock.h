// A lock for a few instructions: taking it costs one atomic operation, and releasing it a store. A mutex costs two, and
// the registries that use this are on the path of each operation.
#pragma once

#include <sched.h>

#include <atomic>

namespace cudafuture {

class SpinLock {
 public:
  void lock() noexcept {
    while (taken_.exchange(true, std::memory_order_acquire)) [[unlikely]] {
      sched_yield();
    }
  }
  void unlock() noexcept { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

}  // namespace cudafuture
