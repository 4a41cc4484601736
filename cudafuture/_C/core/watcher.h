// One thread that watches device events which somebody on the host waits for without blocking.
//
// It runs only while there is something to watch: it polls, at first every few microseconds, less and less often while
// nothing happens, and sleeps on a condition variable when its list is empty. It never records a graph, so it never
// polls inside a capture of its own thread.
//
// Lock: mutex_ guards the inbox, the state and the statistics; no device call is made under it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/continuation.h"

namespace cudafuture {

class Watcher {
 public:
  struct Statistics {
    std::uint64_t polls = 0;    // rounds over the list of watched futures
    std::uint64_t watched = 0;  // futures ever watched
    std::uint64_t pending = 0;  // futures watched now
  };

  static Watcher& get() noexcept;

  // Runs `c` (its parent is done) as soon as the device work behind the parent's events has finished. An error that the
  // device reports instead becomes the late error of the parent; `c` runs all the same.
  void watch(Continuation* c) noexcept;

  // First and longest pause between two polls.
  void set_pauses(std::chrono::microseconds first, std::chrono::microseconds longest) noexcept;

  Statistics statistics() const noexcept;
  void stop() noexcept;  // joins; what is still watched is leaked

 private:
  void loop() noexcept;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<Continuation*> inbox_;
  std::thread thread_;
  bool stopping_ = false;
  std::chrono::microseconds first_pause_{5};
  std::chrono::microseconds longest_pause_{500};
  Statistics statistics_;
};

}  // namespace cudafuture
