#include "fakecuda/cudart/call.h"

#include <atomic>
#include <cstdio>

namespace fakecuda {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<const char*> unsupported_call{nullptr};  // the last one, for the error's text

}  // namespace

cudaError_t CudaCall::fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t CudaCall::device_error() const { return fail(static_cast<cudaError_t>(machine.error)); }

cudaError_t CudaCall::refuse_in_captures() {
  bool refused = false;
  for (const CapturePtr& capture : machine.captures) {
    if (!refuses_unsafe_call(capture->mode, capture->thread == this_thread(), capture_mode())) continue;
    capture->invalidated = true;
    refused = true;
  }
  if (!refused) return cudaSuccess;
  if (machine.settings.verbose) fprintf(stderr, "fakecuda: %s ends a capture\n", name);
  return fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t CudaCall::refuse_with_captures_of(int device) {
  for (const CudaStream* stream : machine.streams_of(device)) {
    if (stream->capture == nullptr) continue;
    stream->capture->invalidated = true;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

cudaError_t CudaCall::refuse_implicit_capture(const CudaStream& stream) {
  if (machine.captures.empty() || &stream != machine.find_stream(cudaStreamLegacy, stream.device)) return cudaSuccess;
  for (const CudaStream* other : machine.streams_of(stream.device)) {
    const bool is_blocking = (other->flags & cudaStreamNonBlocking) == 0;
    if (other != &stream && is_blocking && other->capture != nullptr) return fail(cudaErrorStreamCaptureImplicit);
  }
  return cudaSuccess;
}

cudaError_t CudaCall::enqueue(CudaStream& stream, StreamOperation&& operation) {
  if (stream.capture != nullptr && stream.capture->invalidated) return fail(cudaErrorStreamCaptureInvalidated);
  operation.name = operation.name[0] == 0 ? name : operation.name;
  machine.enqueue(lock, stream, std::move(operation));
  return cudaSuccess;
}

CaptureMode& capture_mode() {
  thread_local CaptureMode mode = CaptureMode::global;
  return mode;
}

uint64_t this_thread() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t id = next++;
  return id;
}

}  // namespace fakecuda

using fakecuda::CudaCall;

extern "C" {

// Called by the generated functions, for what fakecuda does not have.
int fakecuda_unsupported(const char* function) {
  fakecuda::unsupported_call = function;
  if (fakecuda::CudaMachine::get().settings.verbose) fprintf(stderr, "fakecuda: %s is not supported\n", function);
  return CudaCall::fail(cudaErrorNotSupported);
}

cudaError_t cudaPeekAtLastError() {
  const CudaCall call(__func__);
  return call.machine.error != 0 ? static_cast<cudaError_t>(call.machine.error) : fakecuda::last_error;
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  fakecuda::last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorName(cudaError_t error) {
#define NAME(error) \
  case error:       \
    return #error
  switch (error) {
    NAME(cudaSuccess);
    NAME(cudaErrorInvalidValue);
    NAME(cudaErrorMemoryAllocation);
    NAME(cudaErrorInitializationError);
    NAME(cudaErrorCudartUnloading);
    NAME(cudaErrorInvalidDevice);
    NAME(cudaErrorInvalidResourceHandle);
    NAME(cudaErrorIllegalState);
    NAME(cudaErrorNotReady);
    NAME(cudaErrorIllegalAddress);
    NAME(cudaErrorAssert);
    NAME(cudaErrorLaunchFailure);
    NAME(cudaErrorNotSupported);
    NAME(cudaErrorStreamCaptureUnsupported);
    NAME(cudaErrorStreamCaptureInvalidated);
    NAME(cudaErrorStreamCaptureMerge);
    NAME(cudaErrorStreamCaptureUnmatched);
    NAME(cudaErrorStreamCaptureUnjoined);
    NAME(cudaErrorStreamCaptureIsolation);
    NAME(cudaErrorStreamCaptureImplicit);
    NAME(cudaErrorCapturedEvent);
    NAME(cudaErrorHostMemoryAlreadyRegistered);
    NAME(cudaErrorHostMemoryNotRegistered);
    NAME(cudaErrorUnknown);
    default:
      return "cudaError";
  }
#undef NAME
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInitializationError:
      return "initialization error";
    case cudaErrorCudartUnloading:
      return "driver shutting down";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorAssert:
      return "device-side assert triggered";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined:
      return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing stream";
    case cudaErrorNotSupported: {
      thread_local std::string text;
      const char* const function = fakecuda::unsupported_call;
      text = std::string("operation not supported: fakecuda does not have ") + (function ? function : "this function");
      return text.c_str();
    }
    default:
      return cudaGetErrorName(error);
  }
}
}
