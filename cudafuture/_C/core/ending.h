// The wait for one of the library's own threads at shutdown.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace cudafuture {

// Waits, with the lock released, until `has_ended` holds; `told` signals changes. Calls `go_on` (null: wait without
// limit) from time to time, without the lock, to decide whether to continue. Returns false if `go_on` returned false:
// `has_ended` may not hold, and the caller must leave the thread running.
template <class Predicate>
bool wait_for_end(std::unique_lock<std::mutex>& lock, std::condition_variable& told, bool (*go_on)() noexcept,
                  Predicate has_ended) {
  constexpr std::chrono::milliseconds kPatience{50};
  while (!told.wait_for(lock, kPatience, has_ended)) {
    lock.unlock();
    const bool going = go_on == nullptr || go_on();
    lock.lock();
    if (!going) return false;
  }
  return true;
}

}  // namespace cudafuture
