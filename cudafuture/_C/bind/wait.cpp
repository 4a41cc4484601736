// Blocking until a future is done, and until its devices are.
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>

#include "bind/errors.h"
#include "bind/future.h"
#include "bind/pending.h"
#include "bind/submit_pool.h"
#include "core/callback_thread.h"
#include "core/completion_queue.h"
#include "core/error.h"
#include "core/process.h"
#include "core/stream_order.h"
#include "core/stream_pool.h"
#include "core/thread_activity.h"
#include "core/thread_cache.h"

namespace cudafuture::bind {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr milliseconds kSignalInterval{50};  // maximum delay of Ctrl-C
constexpr microseconds kSpin{50};            // polling without pauses pays off for about this long
constexpr microseconds kShortPause{25};
constexpr microseconds kLongPause{200};
constexpr unsigned long kTimerSlack = 1000;  // nanoseconds

bool expired(const Deadline& deadline) { return deadline && Clock::now() >= *deadline; }

[[noreturn]] void raise_timeout(Future& future, const char* what) {
  const std::string who = future.name().empty() ? "the future" : "'" + future.name() + "'";
  std::string message = "timeout: " + who + what + "; it stays valid, so wait() may be called again";
  message += pending_leaves(future);
  if (const std::string reason = exhausted_pool(future); !reason.empty()) message += ". Now " + reason;
  PyErr_SetString(PyExc_TimeoutError, message.c_str());
  throw nb::python_error();
}

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

bool may_be_in_event_loop() {
  static PyObject* const trio = PyUnicode_InternFromString("trio");
  return !running_loop().is_none() || PyDict_Contains(PyImport_GetModuleDict(), trio) > 0;
}

// Warns of a thread that is about to block: it would stop its event loop, with every task of the loop.
void warn_in_event_loop() {
  static Imported warn_if_in_loop{"cudafuture._await", "warn_if_in_loop"};
  if (may_be_in_event_loop()) call(warn_if_in_loop());
}

// Returns true if this thread runs the callback whose child the future is.
bool is_running_here(const Future& future) {
  for (const auto* one = ThreadActivity::innermost(); one != nullptr; one = one->outer()) {
    if (one->kind() == ThreadActivity::Kind::callback && &one->future() == &future) return true;
  }
  return false;
}

// Raises an error for a wait that would never end because this thread itself blocks the completion.
void refuse_deadlock(const Future& future) {
  if (!is_running_here(future)) return;
  raise_error("InvalidStateError", "a callback waits for its own result" +
                                       (future.name().empty() ? "" : " ('" + future.name() + "')") +
                                       ", which can only come after it returns; return the value, or use then_async()");
}

// Tells the core how the program calls this thread.
void name_thread() {
  if (has_thread_name()) return;
  static Imported current_thread{"threading", "current_thread"};
  set_thread_name(utf8_of(call(current_thread()).attr("name")));
}

// Blocks until the future is done. Threads that cannot be interrupted sleep until they are woken. The main thread
// checks for signals from time to time, and the library's own threads for the exit of the process.
bool block(Future& future, const Deadline& deadline) {
  const PoolWait pool_wait(future, deadline.has_value());
  const bool library_thread = CallbackThread::get().is_current() || ThreadCache::is_current();
  if (!is_main_thread() && !library_thread) {
    WithoutGil released;
    return future.wait_until(deadline ? &*deadline : nullptr);
  }
  for (;;) {
    Clock::time_point slice = Clock::now() + kSignalInterval;
    if (deadline) slice = std::min(slice, *deadline);
    bool done;
    {
      WithoutGil released;
      done = future.wait_until(&slice);
    }
    check_signals();
    if (done) return true;
    if (expired(deadline)) return false;
    CallbackThread::get().retry();
    if (CallbackThread::get().has_lost()) {
      raise_error("InvalidStateError",
                  "the process is exiting: the completion of this future, or of another, came too late");
    }
    if (library_thread && is_shut_down()) {
      raise_error("InvalidStateError", "the process is exiting: a callback waited for a future that was not completed");
    }
  }
}

// The pauses of a thread that polls a device. They are short enough to notice the end within 30 us. They are long
// enough that, with good timers, polling takes a fifth of a core, where a driver that spins takes a whole one. After a
// tenth of a second the pauses grow longer.
class PollingPauses {
 public:
  // The kernel may lengthen a sleep by the thread's slack, usually 50 us.
  PollingPauses() noexcept : slack_before_(prctl(PR_GET_TIMERSLACK)) { prctl(PR_SET_TIMERSLACK, kTimerSlack); }
  ~PollingPauses() {
    if (slack_before_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_before_));
  }
  PollingPauses(const PollingPauses&) = delete;
  PollingPauses& operator=(const PollingPauses&) = delete;

  void pause(Clock::time_point now, nanoseconds waited) noexcept {
    const nanoseconds hasty = std::min<nanoseconds>(waited / 8, kShortPause);
    const nanoseconds patient = std::min<nanoseconds>(waited / 4096, kLongPause);
    const nanoseconds asked = std::max<nanoseconds>(std::max(hasty, patient) - overslept_, microseconds(1));
    const timespec t{0, asked.count()};
    nanosleep(&t, nullptr);
    overslept_ = Clock::now() - now - asked;
  }

 private:
  int slack_before_;
  nanoseconds overslept_{0};  // of the last sleep: the delay that this machine adds
};

// Polls, because a driver's own blocking call reacts neither to Ctrl-C nor to a timeout.
void poll_devices(Future& future, const Deadline& deadline) {
  const Clock::time_point begin = Clock::now();
  Clock::time_point signals_seen = begin;
  std::optional<PollingPauses> pauses;
  std::optional<ThreadActivity> waiting;  // once the wait is long, or for a tracer
  bool finished = false;
  // Before the first question to the device, which is itself a wait in virtual time.
  if (is_traced()) waiting.emplace(ThreadActivity::Kind::wait, future, nullptr, calling_line(), deadline.has_value());
  if (may_be_in_event_loop() && !expired(deadline) && !future.device_work_finished()) warn_in_event_loop();
  while (!finished) {
    {
      WithoutGil released;
      for (;;) {
        finished = future.device_work_finished();
        const Clock::time_point now = Clock::now();
        if (finished || (deadline && now >= *deadline) || now - signals_seen >= kSignalInterval) break;
        if (now - begin < kSpin) {
          sched_yield();
          continue;
        }
        if (!pauses) pauses.emplace();
        pauses->pause(now, now - begin);
      }
    }
    signals_seen = Clock::now();
    if (finished) break;
    check_signals();
    if (!waiting) waiting.emplace(ThreadActivity::Kind::wait, future, nullptr, calling_line(), deadline.has_value());
    if (expired(deadline)) raise_timeout(future, " is complete but its device work has not finished");
  }
}

// Waits until the device work behind the events has finished. The host cannot wait inside a capture, or for captured
// work: a completed future then raises an error, and a failed one raises its own error without waiting.
void finish_devices(Future& future, const Deadline& deadline) {
  try {
    for (c10::Device device : future.events().devices()) refuse_while_capturing(device);
  } catch (const Error&) {
    if (future.state() == State::completed) throw;
    return;
  }
  refuse_captured(future, "a blocking wait()");
  if (!future.events().is_captured()) poll_devices(future, deadline);
}

// Orders the current streams after the future's events. A failed future raises its own error: a broken device's error
// becomes the late error.
void order_streams(Future& future) {
  if (future.state() == State::completed) {
    order_callers_streams(future);
    return;
  }
  try {
    const WithoutGil released;
    order_current_streams(future, {});
  } catch (const std::exception&) {
    future.set_late_error(std::current_exception());
  }
}

}  // namespace

void order_callers_streams(Future& future, OrderingSyncEdges edges) {
  {
    const std::vector<DeviceMemory> memory = memory_of(future);
    const WithoutGil released;
    order_current_streams(future, memory, edges);
  }
  future.consumed();
}

namespace {

bool wait_while_pending(Future& future, const Deadline& deadline) {
  const ParkingScope parking;
  refuse_after_fork();
  refuse_deadlock(future);
  CompletionQueue& queue = CompletionQueue::current();
  const bool on_callback_thread = CallbackThread::get().is_current();
  if (queue.is_deepest() && (on_callback_thread || !queue.empty())) {
    raise_error("InvalidStateError",
                "too many callbacks wait inside one another on this thread, and the callbacks that would end the waits "
                "are queued behind them; give callbacks that wait an executor of their own, or use then_async()");
  }
  if (queue.draining() && !queue.empty()) {
    queue.help(future);
    raise_kept_interrupt();
  }
  if (future.done()) return true;
  if (expired(deadline)) return false;
  warn_in_event_loop();
  name_thread();
  const ThreadActivity waiting(ThreadActivity::Kind::wait, future, nullptr, calling_line(), deadline.has_value());
  if (on_callback_thread) CallbackThread::get().help(future, deadline ? &*deadline : nullptr);
  return future.done() || (!expired(deadline) && block(future, deadline));
}

}  // namespace

// In virtual time a done future may lie ahead of this thread: a tracer sees the wait until then.
[[gnu::cold, gnu::noinline]] bool traced_wait_until_done(Future& future, const Deadline& deadline) {
  const ThreadActivity waiting(ThreadActivity::Kind::wait, future, nullptr, calling_line(), deadline.has_value());
  if (!future.done() && !wait_while_pending(future, deadline)) return false;
  future.observe();
  return true;
}

bool try_wait_until_done(Future& future, const Deadline& deadline) {
  if (is_traced() && has_host_clock()) [[unlikely]]
    return traced_wait_until_done(future, deadline);
  if (!future.done() && !wait_while_pending(future, deadline)) return false;
  future.observe();
  return true;
}

void wait_until_done(Future& future, const Deadline& deadline) {
  if (!try_wait_until_done(future, deadline)) raise_timeout(future, " is still pending");
}

void wait_for_devices(Future& future, bool non_blocking, const Deadline& deadline) {
  if (!future.events().empty()) {
    if (!non_blocking) finish_devices(future, deadline);
    order_streams(future);
  }
  if (!non_blocking) raise_late_error(future);
}

void refuse_captured(const Future& future, const char* what) {
  if (!future.events().is_captured() || future.state() != State::completed) return;
  raise_error("InvalidStateError",
              std::string(what) +
                  " needs to know whether the device work has finished, but this future was completed "
                  "inside a stream capture, whose events the host cannot query; use "
                  "wait(non_blocking=True), which only orders the streams");
}

void raise_late_error(Future& future) {
  if (future.state() != State::completed) return;
  if (const nb::object late = late_error_of(future); !late.is_none()) raise(late);
}

}  // namespace cudafuture::bind
