// Runs queued work inside the host's calls; the policy chooses the moment and the work.
//
// A piece of work runs outside the lock, with its stream marked busy. Another thread that needs that stream sleeps
// until something has changed. Calls from inside work only enqueue: they run nothing, and they may not wait.
//
// Lock: the submission lock, given to each call and held before and after it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "sim/runtime/schedule.h"
#include "sim/runtime/stream.h"

namespace sim::runtime {

using Lock = std::unique_lock<std::mutex>;

class Runner {
 public:
  // Called under the lock, when work has thrown.
  using OnError = std::function<void(Stream& stream, std::exception_ptr error, Report&& report)>;
  explicit Runner(OnError on_error) : on_error_(std::move(on_error)) {}

  static bool inside_work() noexcept;  // this thread runs a piece of work

  // Waits for work that runs in other threads, before start() changes anything.
  void settle(Lock& lock);
  void start(WorkSchedule schedule, std::uint64_t seed);

  void push(Stream& stream, Item&& item);
  void drop_queue(Stream& stream);
  std::vector<Item>& dropped() noexcept { return dropped_; }  // for the caller to destroy outside the lock

  void after_call(Lock& lock);  // runs the work that the schedule chooses at a call that waits for nothing
  void after_query(Lock& lock, const std::vector<RecordingPtr>& asked);
  // Sleeps if it must. It may throw an exception of the check: queued work stays queued, and may be waited for again.
  void run_until(Lock& lock, const std::vector<RecordingPtr>& wanted);
  void wake() noexcept;                                        // wakes the sleepers: something has changed
  std::uint64_t changes() const noexcept { return changes_; }  // grows with every change

  void set_sleep_hooks(void* (*before)(), void (*after)(void*), void (*check)()) noexcept;
  void set_run_hook(void (*hook)(const std::function<void()>& run)) noexcept { run_hook_ = hook; }

  std::uint64_t executed = 0;
  std::uint64_t dropped_tasks = 0;

 private:
  // The position that a stream must reach, and the position up to which its queue was searched for waits.
  struct Need {
    Stream* stream;
    std::uint64_t position;
    std::uint64_t searched;
  };
  using Needs = std::vector<Need>;
  using Clock = std::chrono::steady_clock;
  struct Failure {
    std::exception_ptr error;
    Report report;
  };

  static Needs closure(const std::vector<RecordingPtr>& wanted);
  bool step_towards(Lock& lock, const Needs& needs);
  bool step_any(Lock& lock);
  void step(Lock& lock, Stream& stream);
  void run(Lock& lock, Stream& stream, Item& item);
  Failure perform(const Stream& stream, const Item& item) const noexcept;
  void sleep(Lock& lock, Clock::time_point& next_check);
  std::exception_ptr sleep_until_change(Lock& lock, std::uint64_t seen, Clock::time_point& next_check);
  void unlist(Stream& stream);

  const OnError on_error_;
  Policy policy_;
  std::vector<Stream*> listed_;  // streams with queued work, in the order in which they got it
  std::vector<Item> dropped_;
  int running_ = 0;
  std::uint64_t changes_ = 0;
  int sleepers_ = 0;
  std::condition_variable changed_;
  std::atomic<void* (*)()> before_sleep_{nullptr};
  std::atomic<void (*)(void*)> after_sleep_{nullptr};
  std::atomic<void (*)()> check_{nullptr};
  std::atomic<void (*)(const std::function<void()>&)> run_hook_{nullptr};
};

}  // namespace sim::runtime
