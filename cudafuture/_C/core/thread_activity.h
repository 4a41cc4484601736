// The waits and the callbacks that the threads of this process are in, as another thread can see them.
//
//     ThreadActivity on the stack of a thread ──► outer ──► outer      innermost first
//
// Lock: each thread has a spin lock, under which its list gets shorter; only the walk of pending.h takes another
// thread's. An activity is added without the lock.
#pragma once

#include <ATen/record_function.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/future.h"

namespace cudafuture {

// A line of code, in memory that lives as long as the thread's activity.
struct CodeLine {
  const char* file = nullptr;  // null: unknown
  int line = 0;
  const char* function = nullptr;
};
std::string text_of(const CodeLine& line);

class ThreadActivity {
 public:
  enum class Kind : std::uint8_t { wait, callback };

  // `future`: that the thread waits for, or the child of the callback that it runs, or the callback's parent if it has
  // no child. `function`: the foreign function of the callback; null: none.
  ThreadActivity(Kind kind, Future& future, void* function, const CodeLine& line = {},
                 bool has_timeout = false) noexcept;
  ~ThreadActivity();
  ThreadActivity(const ThreadActivity&) = delete;
  ThreadActivity& operator=(const ThreadActivity&) = delete;

  Kind kind() const noexcept { return kind_; }
  const Future& future() const noexcept { return future_; }
  const ThreadActivity* outer() const noexcept { return outer_; }
  // The calling thread's innermost activity; null: none.
  static const ThreadActivity* innermost() noexcept;

 private:
  [[gnu::cold, gnu::noinline]] void begin_profiled() noexcept;

  friend struct ThreadRecord;
  friend std::vector<struct ThreadActivities> thread_states();

  const Kind kind_;
  Future& future_;
  void* const function_;
  const CodeLine line_;
  const bool has_timeout_;
  const std::int64_t begun_;  // coarse_time()
  const ThreadActivity* outer_;
  std::optional<at::RecordFunction> profiled_;  // in a profile of torch.profiler or emit_nvtx()
};

// Copies of the activities of one thread.
struct ActivityState {
  ThreadActivity::Kind kind;
  WeakFuture future;
  std::string line;      // of the wait; empty: unknown
  std::string function;  // of the callback; empty: unknown
  double seconds;        // since it began
  bool has_timeout;      // the wait ends by itself
};
struct ThreadActivities {
  pid_t thread;
  std::string name;
  bool is_main;
  std::string queue;                      // the serial queue whose callback it runs; empty: none
  std::vector<ActivityState> activities;  // outermost first
};

// Returns the threads that are in a wait or in a callback.
std::vector<ThreadActivities> thread_states();

// Names the calling thread, as the program knows it.
void set_thread_name(std::string name);
bool has_thread_name() noexcept;

}  // namespace cudafuture
