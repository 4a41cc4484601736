// Stream captures: a query for a stream's capture, and a scope for host calls that must not end one.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace cudafuture {

// Returns a number that identifies the capture in which the stream's work is recorded into a graph; 0 if there is none.
// No other capture of the process has the same number. Only where the device can tell no number, and for a capture that
// a forbidden call has ended, it is 1. Call it with the stream's device current (pytorch#135273).
std::uint64_t capture_of(const c10::Stream& stream);

// True while the stream's work is recorded into a graph. Call it with the stream's device current.
inline bool is_capturing(const c10::Stream& stream) { return capture_of(stream) != 0; }

// A scope in which the calling thread queries and synchronizes events without ending the captures of other threads. A
// capture in CUDA's default mode (global) fails when any thread calls a function that CUDA counts as unsafe, unless
// that thread is in relaxed mode. Construct the scope with the event's device current: otherwise CUDA creates a context
// on another device.
class BesideCaptures {
 public:
  explicit BesideCaptures(c10::DeviceType type) noexcept;
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int (*exchange_)(int* mode);  // null: the devices have no capture modes
  int before_ = -1;             // the thread's mode outside the scope; -1: unchanged
};

// Tells that the calling thread is one of the library's. relax_captures() then applies to it.
void mark_library_thread() noexcept;

// Sets relaxed mode in a thread of the library, once and permanently; does nothing in other threads. Code that the
// program gives the library, such as a callback, then does not end captures of other threads either. Call it with a
// device current that has a context.
void relax_captures(c10::DeviceType type) noexcept;

// True in a thread of the library that is not in relaxed mode yet.
bool may_end_captures() noexcept;

}  // namespace cudafuture
