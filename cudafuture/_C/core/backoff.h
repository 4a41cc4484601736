// Pauses between looks at something that does not announce itself: at first short, then each a sixteenth longer than
// the one before. So what happens is noticed late by a sixteenth of the time that it took, and never by more than the
// longest pause.
#pragma once

#include <algorithm>
#include <chrono>

namespace cudafuture {

class Backoff {
 public:
  using Pause = std::chrono::nanoseconds;

  Backoff(Pause first, Pause longest) noexcept : first_(first), longest_(std::max(first, longest)), next_(first) {}

  // Something happened: begin anew.
  void reset() noexcept { next_ = first_; }

  // How long to pause now.
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
