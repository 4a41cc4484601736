// The mode of a stream capture, and of a thread: together they decide which host calls end the capture.
#pragma once

namespace machine {

// cudaStreamCaptureMode, with its values.
enum class CaptureMode : int { global = 0, thread_local_ = 1, relaxed = 2 };

// Returns true if a capture refuses a potentially unsafe call of a thread (CUDA runtime API,
// cudaThreadExchangeStreamCaptureMode): a thread's own capture does unless its mode is relaxed, that of another thread
// if both modes, the capture's and the thread's, are global. No capture refuses a call of a thread whose mode is
// relaxed.
constexpr bool refuses_unsafe_call(CaptureMode capture, bool is_own, CaptureMode thread) noexcept {
  if (thread == CaptureMode::relaxed) return false;
  const bool is_own_and_strict = is_own && capture != CaptureMode::relaxed;
  return is_own_and_strict || (thread == CaptureMode::global && capture == CaptureMode::global);
}

}  // namespace machine
