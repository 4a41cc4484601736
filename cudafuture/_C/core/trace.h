// The hook through which a tracer observes futures. Without a tracer it costs one load of a null pointer.
#pragma once

#include <atomic>

namespace cudafuture {

class Future;

enum class TraceEvent { created, done, callback_begin, callback_end };

// Called on the thread of the event, with no lock of the core held. Must not throw, and must not complete futures.
using TraceHook = void (*)(TraceEvent event, const Future& future);

inline std::atomic<TraceHook> trace_hook{nullptr};

inline void trace(TraceEvent event, const Future& future) {
  if (TraceHook hook = trace_hook.load(std::memory_order_acquire)) [[unlikely]] {
    hook(event, future);
  }
}

}  // namespace cudafuture
