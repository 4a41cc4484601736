// One call of the CUDA API: it holds the machine's lock, and knows the errors that all calls share.
#pragma once

#include <cuda_runtime_api.h>

#include "fakecuda/devices/machine.h"
#include "machine/capture_mode.h"

namespace fakecuda {

class CudaCall {
 public:
  explicit CudaCall(const char* name) : machine(CudaMachine::get()), lock(machine.mutex), name(name) {}

  // Sets the thread's last error, which cudaGetLastError returns and resets.
  static cudaError_t fail(cudaError_t error);

  // The error that ended the device's work (a "sticky" error: all further calls return it), or cudaSuccess.
  cudaError_t device_error() const;

  // A potentially unsafe call fails during the captures that refuse it (refuses_unsafe_call), and ends them.
  cudaError_t refuse_in_captures();

  // CUDA Programming Guide, "Prohibited and Unhandled Operations": waiting for a device fails while one of its streams
  // is in a capture, and ends the capture. The modes do not change that.
  cudaError_t refuse_with_captures_of(int device);

  // CUDA runtime API, cudaStreamIsCapturing: a question about the legacy default stream fails while a stream that was
  // made without cudaStreamNonBlocking is in a capture, and ends nothing.
  cudaError_t refuse_implicit_capture(const CudaStream& stream);

  CudaStream* stream(cudaStream_t handle) { return machine.find_stream(handle, current_device()); }

  // Enqueues work, unless the stream's capture has ended with an error.
  cudaError_t enqueue(CudaStream& stream, StreamOperation&& operation);

  CudaMachine& machine;
  CudaMachine::Lock lock;
  const char* const name;
};

// The capture mode of the calling thread.
CaptureMode& capture_mode();

uint64_t this_thread();

}  // namespace fakecuda

// Returns from the calling function with an error, if there is one.
#define FAKECUDA_RETURN_IF(expression)                                  \
  if (const cudaError_t failed = (expression); failed != cudaSuccess) { \
    return failed;                                                      \
  }
