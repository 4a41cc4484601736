// One thread that watches device events which somebody on the host waits for without blocking.
//
// It runs only while there is something to watch: it polls, at first every few microseconds, less and less often while
// nothing happens, and sleeps on a condition variable when its list is empty. It never records a graph, so it never
// polls inside a capture of its own thread.
//
// When the process goes away it looks a last time. What is not due then never runs: it is abandoned on the callback
// thread, so that nobody waits for what it would have completed.
//
// Lock: mutex_ guards the inbox, the state and the statistics; no device call is made under it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/backoff.h"
#include "core/continuation.h"

namespace cudafuture {

class Watcher {
 public:
  struct Statistics {
    std::uint64_t polls = 0;    // rounds over the list of watched futures
    std::uint64_t wakeups = 0;  // how often the thread woke up: none while nothing is watched
    std::uint64_t watched = 0;  // futures ever watched
    std::uint64_t pending = 0;  // futures watched now
  };

  static Watcher& get() noexcept;

  // Runs `c` (its parent is done) as soon as the device work behind the parent's events has finished. An error that the
  // device reports instead becomes the late error of the parent; `c` runs all the same.
  void watch(Continuation* c) noexcept;
  // Starts the thread. Throws where the system has none.
  void require();

  // False: the process goes away, or the system has no thread for the watcher.
  bool try_watch(Continuation* c) noexcept;

  // First and longest pause between two polls.
  void set_pauses(std::chrono::microseconds first, std::chrono::microseconds longest) noexcept;

  Statistics statistics() const noexcept;

  // Looks a last time, abandons what is not due, and joins. `go_on` is asked now and then while a device does not
  // answer; when it says no the thread is left to itself.
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
