// The thread that polls device events for callers that wait on the host without blocking.
//
// It runs only while it has something to watch. It polls every few microseconds at first, and less often while nothing
// happens; with an empty list it sleeps on a condition variable. It never records a graph, so it never polls inside a
// capture of its own thread.
//
// At shutdown it polls a last time. Continuations that are not due then never run: they are abandoned on the callback
// thread, so that no caller waits for the futures that they would have completed.
//
// Lock: mutex_ guards the inbox, the state and the statistics; no device call is made under it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/continuation.h"

namespace cudafuture {

// Growing pauses for polling: each pause is a sixteenth longer than the one before, up to a longest pause.
//
// A poller therefore notices an event late by at most a sixteenth of the time that it took, and by at most the longest
// pause.
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

class Watcher {
 public:
  struct Statistics {
    std::uint64_t polls = 0;    // rounds over the list of watched futures
    std::uint64_t wakeups = 0;  // times the thread woke up: zero while nothing is watched
    std::uint64_t watched = 0;  // futures ever watched
    std::uint64_t pending = 0;  // futures watched now
  };

  static Watcher& get() noexcept;

  // Runs `c` (its parent is done) as soon as the device work behind the parent's events has finished. A device error
  // becomes the late error of the parent; `c` runs all the same.
  void watch(Continuation* c) noexcept;
  // Starts the thread. Throws if the system refuses one.
  void require();

  // False: the process is shutting down, or the system refused a thread for the watcher.
  bool try_watch(Continuation* c) noexcept;

  // First and longest pause between two polls.
  void set_pauses(std::chrono::microseconds first, std::chrono::microseconds longest) noexcept;

  Statistics statistics() const noexcept;

  // Polls a last time, abandons the continuations that are not due, and joins the thread. Calls `go_on` from time to
  // time while a device does not answer; when it returns false, the thread is left running.
  void stop(bool (*go_on)() noexcept = nullptr) noexcept;

 private:
  using List = std::vector<Continuation*>;

  enum class Run { begun, no_thread, stopped };

  Run put(Continuation* c) noexcept;
  Run start_locked() noexcept;
  void loop() noexcept;
  void sleep(std::unique_lock<std::mutex>& lock, bool is_watching) noexcept;
  static List take_due(List& watched) noexcept;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable end_;
  List inbox_;
  std::thread thread_;
  bool stopping_ = false;
  bool ended_ = false;
  Backoff backoff_{std::chrono::microseconds(5), std::chrono::microseconds(5000)};
  Statistics statistics_;
};

}  // namespace cudafuture
