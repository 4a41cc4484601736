// Stream captures: whether a stream is in one, and host calls that must not end one.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace cudafuture {

// True while the stream's work is recorded into a graph. Call it with the stream's device current (pytorch#135273).
bool is_capturing(const c10::Stream& stream);

// Lets the calling thread query and synchronize events for a scope without ending the captures of other threads. A
// capture of CUDA's default mode (global) ends with an error when any thread calls a function that CUDA counts as
// unsafe, unless that thread is in relaxed mode. Construct it with the event's device current: otherwise CUDA creates a
// context on another device.
class BesideCaptures {
 public:
  explicit BesideCaptures(c10::DeviceType type) noexcept;
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  c10::DeviceType type_;
  int before_ = -1;  // the thread's mode outside of the scope; -1: nothing was changed
};

// Exchanges the calling thread's capture mode, as cudaThreadExchangeStreamCaptureMode does: `*mode` goes in and the
// former one comes out. Returns 0 on success.
using ExchangeCaptureMode = int (*)(int* mode);

// Sets the function for a device type. CUDA's comes with torch; a simulated accelerator brings its own.
void set_exchange_capture_mode(c10::DeviceType type, ExchangeCaptureMode exchange) noexcept;

}  // namespace cudafuture
