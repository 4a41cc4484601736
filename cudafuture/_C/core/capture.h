// Stream captures: a query for a stream's capture, and a scope for host calls that must not end one.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace cudafuture {

// True while the stream's work is recorded into a graph. Call it with the stream's device current (pytorch#135273).
bool is_capturing(const c10::Stream& stream);

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
  c10::DeviceType type_;
  int before_ = -1;  // the thread's mode outside the scope; -1: unchanged
};

// Exchanges the calling thread's capture mode, as cudaThreadExchangeStreamCaptureMode does: `*mode` is the new mode,
// and receives the old one. Returns 0 on success.
using ExchangeCaptureMode = int (*)(int* mode);

// Sets the exchange function for a device type. CUDA's comes with torch; a simulated accelerator brings its own.
void set_exchange_capture_mode(c10::DeviceType type, ExchangeCaptureMode exchange) noexcept;

}  // namespace cudafuture
