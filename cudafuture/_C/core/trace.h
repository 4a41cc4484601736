// The hook through which a tracer observes futures and threads. Without a tracer it costs one load of a null pointer.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

namespace cudafuture {

class Future;
struct CodeLine;

enum class TraceEvent : std::uint8_t {
  created,         // a future was made
  issued,          // an engine has issued the operation that a future stands for
  follows,         // a future waits for another one: the child of a callback, or a combination
  done,            // a future is done
  ready,           // the host has seen that the device work behind a future has finished
  wait_begin,      // a thread waits for a future
  wait_end,        //
  callback_begin,  // a thread runs the callback that completes a future
  callback_end,    //
  span_begin,      // a thread is in a part of the program that it names; no future
  span_end,        //
  reached,         // the device has reached an event of a future; the recorder writes it
};

// Returns the nanoseconds of CLOCK_MONOTONIC.
inline std::int64_t monotonic_nanoseconds() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Facts about an event beside its future. A null pointer: the event has no such fact.
struct TraceDetail {
  const Future* parent = nullptr;  // follows
  const CodeLine* line = nullptr;  // wait_begin
  void* function = nullptr;        // callback_begin: the foreign function
};

// Called on the thread of the event, with no lock of the core held. Must not throw, and must not complete futures.
using TraceHook = void (*)(TraceEvent event, const Future& future, const TraceDetail& detail);

inline std::atomic<TraceHook> trace_hook{nullptr};

inline bool is_traced() noexcept { return trace_hook.load(std::memory_order_relaxed) != nullptr; }

// Out of line, so that the detail costs nothing on a path that is not traced.
[[gnu::cold, gnu::noinline]] inline void call_trace_hook(TraceEvent event, const Future& future,
                                                         const TraceDetail& detail) {
  if (TraceHook hook = trace_hook.load(std::memory_order_acquire)) hook(event, future, detail);
}

inline void trace(TraceEvent event, const Future& future) {
  if (is_traced()) [[unlikely]]
    call_trace_hook(event, future, {});
}
inline void trace(TraceEvent event, const Future& future, const TraceDetail& detail) {
  if (is_traced()) [[unlikely]]
    call_trace_hook(event, future, detail);
}

}  // namespace cudafuture
