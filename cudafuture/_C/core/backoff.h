// Growing pauses for polling: each pause is a sixteenth longer than the one before, up to a longest pause.
//
// A poller therefore notices an event late by at most a sixteenth of the time that it took, and by at most the longest
// pause.
#pragma once

#include <algorithm>
#include <chrono>

namespace cudafuture {

class Backoff {
 public:
  using Pause = std::chrono::nanoseconds;

  Backoff(Pause first, Pause longest) noexcept : first_(first), longest_(std::max(first, longest)), next_(first) {}

  // Starts again with the first pause, after something happened.
  void reset() noexcept { next_ = first_; }

  // Returns the pause to make now.
  Pause next() noexcept {
    const Pause pause = next_;
    next_ = std::min(longest_, pause + std::max(pause / 16, Pause(1)));
    return pause;
  }

 private:
  Pause first_;
  Pause longest_;
  Pause next_;
};

}  // namespace cudafuture
