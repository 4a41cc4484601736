// How the library waits for its own threads when it shuts down.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace cudafuture {

// Waits, with the lock given up, until `has_ended` holds, of which `told` tells. Now and then, without the lock, it
// asks `go_on` (null: for ever) whether to wait on. False: it need not hold, and whoever has not ended is to be left
// alone.
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
