// CUDA runtime API, "Event Management", and cudaStreamWaitEvent.
#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

CudaEvent* find_event(CudaCall& call, cudaEvent_t handle) {
  auto* const event = reinterpret_cast<CudaEvent*>(handle);
  return call.machine.is_event(event) ? event : nullptr;
}

// An event that was recorded inside a capture has no state that the host could ask for; asking ends the capture.
cudaError_t refuse_captured(CudaCall& call, const CudaEvent& event) {
  if (event.recording == nullptr || event.recording->capture == nullptr) return cudaSuccess;
  if (call.machine.captures.count(event.recording->capture) != 0) event.recording->capture->invalidated = true;
  return CudaCall::fail(cudaErrorCapturedEvent);
}

bool is_timed(const CudaEvent& event) { return (event.flags & cudaEventDisableTiming) == 0; }

}  // namespace

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  call.machine.make_context(current_device(), call.name);
  *handle = reinterpret_cast<cudaEvent_t>(call.machine.make_event(current_device(), flags));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  CudaCall call(__func__);
  CudaEvent* const event = find_event(call, handle);
  if (event == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  call.machine.destroy_event(event);
  return call.device_error();
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  CudaEvent* const event = find_event(call, handle);
  CudaStream* const stream = call.stream(stream_handle);
  if (event == nullptr || stream == nullptr || event->device != stream->device) {
    return CudaCall::fail(cudaErrorInvalidResourceHandle);
  }
  if (stream->capture != nullptr && stream->capture->invalidated)
    return CudaCall::fail(cudaErrorStreamCaptureInvalidated);
  event->recording = call.machine.record(call.lock, *stream, is_timed(*event));
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

// A stream that waits for an event of a capture joins the capture. A capturing stream cannot wait for work outside of
// the capture (cudaErrorStreamCaptureIsolation), and one stream cannot be in two captures.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  CudaEvent* const event = find_event(call, handle);
  CudaStream* const stream = call.stream(stream_handle);
  if (event == nullptr || stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  const RecordingPtr recording = event->recording;
  if (recording == nullptr) return cudaSuccess;
  if (recording->capture != nullptr && call.machine.captures.count(recording->capture) != 0) {
    if (stream->capture == nullptr) stream->capture = recording->capture;
    if (stream->capture != recording->capture) return CudaCall::fail(cudaErrorStreamCaptureMerge);
    stream->capture->join(stream, *recording);
    return cudaSuccess;
  }
  if (stream->capture != nullptr) {
    stream->capture->invalidated = true;
    return CudaCall::fail(cudaErrorStreamCaptureIsolation);
  }
  if (recording->capture == nullptr) call.machine.wait_for(call.lock, *stream, recording);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  const CudaEvent* const event = find_event(call, handle);
  if (event == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  FAKECUDA_RETURN_IF(refuse_captured(call, *event));
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  if (event->recording == nullptr || call.machine.query(*event->recording)) return cudaSuccess;
  return CudaCall::fail(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  const CudaEvent* const event = find_event(call, handle);
  if (event == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  FAKECUDA_RETURN_IF(refuse_captured(call, *event));
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  if (const RecordingPtr recording = event->recording) {
    call.machine.synchronize(call.lock, *recording->stream, recording->position);
    call.machine.races.host_saw(*recording);
  }
  return call.device_error();
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  const CudaEvent* const begin = find_event(call, begin_handle);
  const CudaEvent* const end = find_event(call, end_handle);
  for (const CudaEvent* event : {begin, end}) {
    if (event == nullptr || event->recording == nullptr || !is_timed(*event)) {
      return CudaCall::fail(cudaErrorInvalidResourceHandle);
    }
  }
  if (!begin->recording->reached() || !end->recording->reached()) return CudaCall::fail(cudaErrorNotReady);
  *ms = std::chrono::duration<float, std::milli>(end->recording->time - begin->recording->time).count();
  return cudaSuccess;
}
}
