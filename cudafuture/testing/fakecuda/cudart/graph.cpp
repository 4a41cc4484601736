// CUDA runtime API, "Stream Capture" and "Graph Management". A graph runs its operations in the order of their capture,
// which is one of the orders that its dependencies allow.
#include <utility>

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

Graph* graph_of(const void* handle) { return static_cast<Graph*>(const_cast<void*>(handle)); }

}  // namespace

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  CudaStream* const stream = call.stream(handle);
  const bool is_default = reinterpret_cast<uintptr_t>(handle) <= 2;
  if (stream == nullptr || is_default) return CudaCall::fail(cudaErrorStreamCaptureUnsupported);
  if (stream->capture != nullptr) return CudaCall::fail(cudaErrorIllegalState);
  static uint64_t next = 1;
  auto capture = std::make_shared<CudaCapture>();
  capture->id = next++;
  capture->mode = static_cast<CaptureMode>(mode);
  capture->thread = this_thread();
  capture->origin = stream;
  stream->capture = capture;
  call.machine.captures.insert(capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  CudaCall call(__func__);
  *graph = nullptr;
  CudaStream* const stream = call.stream(handle);
  if (stream == nullptr || stream->capture == nullptr) return CudaCall::fail(cudaErrorIllegalState);
  const CapturePtr capture = stream->capture;
  if (capture->origin != stream) return CudaCall::fail(cudaErrorStreamCaptureUnmatched);
  const bool is_joined = capture->is_joined_by(stream);
  for (int device = 0; device < call.machine.device_count(); ++device) {
    for (CudaStream* each : call.machine.streams_of(device)) {
      if (each->capture == capture) each->capture = nullptr;
    }
  }
  call.machine.captures.erase(capture);
  if (capture->invalidated) return CudaCall::fail(cudaErrorStreamCaptureInvalidated);
  if (!is_joined) return CudaCall::fail(cudaErrorStreamCaptureUnjoined);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{capture->nodes});
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  CudaCall call(__func__);
  const CudaStream* const stream = call.stream(handle);
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  FAKECUDA_RETURN_IF(call.refuse_implicit_capture(*stream));
  *status = stream->capture == nullptr     ? cudaStreamCaptureStatusNone
            : stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                           : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  FAKECUDA_RETURN_IF(cudaStreamIsCapturing(handle, status));
  CudaCall call(__func__);
  const CudaStream* const stream = call.stream(handle);
  if (id != nullptr) *id = stream->capture != nullptr ? stream->capture->id : 0;
  if (graph != nullptr) *graph = nullptr;
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const auto wanted = static_cast<CaptureMode>(*mode);
  *mode = static_cast<cudaStreamCaptureMode>(std::exchange(capture_mode(), wanted));
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes != nullptr) return CudaCall::fail(cudaErrorNotSupported);
  *count = graph_of(graph)->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*graph_of(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  CudaStream* const stream = call.stream(handle);
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  for (const StreamOperation& node : graph_of(executable)->nodes) {
    FAKECUDA_RETURN_IF(call.enqueue(*stream, StreamOperation(node)));
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph_of(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete graph_of(executable);
  return cudaSuccess;
}
}
