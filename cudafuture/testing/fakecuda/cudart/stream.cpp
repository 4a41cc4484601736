// CUDA runtime API, "Stream Management", and the interface of launch.h.
#include "fakecuda/devices/launch.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

// A capturing stream cannot be waited for; trying to ends the capture.
cudaError_t refuse_captured(const CudaStream* stream) {
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  if (stream->capture == nullptr) return cudaSuccess;
  stream->capture->invalidated = true;
  return CudaCall::fail(cudaErrorStreamCaptureUnsupported);
}

// Operations keep their names by pointer.
const char* intern(const char* name) {
  static std::mutex mutex;
  static auto* const names = new std::unordered_set<std::string>;
  const std::lock_guard lock(mutex);
  return names->emplace(name).first->c_str();
}

void launch(void* handle, StreamOperation&& operation) {
  operation.site = CudaMachine::get().races.here(operation.name);
  CudaCall call(operation.name);
  CudaStream* const stream = call.stream(static_cast<cudaStream_t>(handle));
  if (stream == nullptr) {
    fprintf(stderr, "fakecuda: %s was launched on a stream that does not exist, or no longer\n", operation.name);
    call.machine.break_device(cudaErrorInvalidResourceHandle);
    return;
  }
  ++call.machine.counters.kernels_run;
  call.enqueue(*stream, std::move(operation));
}

cudaError_t enqueue_host_function(CudaCall& call, cudaStream_t handle, std::function<void()> run) {
  FAKECUDA_RETURN_IF(call.device_error());
  CudaStream* const stream = call.stream(handle);
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  StreamOperation operation;
  operation.kind = StreamOperation::Kind::kHostFunction;
  operation.run = std::move(run);
  return call.enqueue(*stream, std::move(operation));
}

}  // namespace

void fakecuda_launch(void* stream, const char* name, std::vector<MemoryAccess> accesses, std::function<void()> kernel) {
  StreamOperation operation;
  operation.name = intern(name);
  operation.accesses = std::move(accesses);
  operation.run = std::move(kernel);
  launch(stream, std::move(operation));
}

void fakecuda_launch_until(void* stream, const char* name, std::vector<MemoryAccess> accesses,
                           std::function<bool()> attempt) {
  StreamOperation operation;
  operation.kind = StreamOperation::Kind::kAttempt;
  operation.name = intern(name);
  operation.accesses = std::move(accesses);
  operation.attempt = std::move(attempt);
  launch(stream, std::move(operation));
}

void fakecuda_wake() {
  const CudaCall call(__func__);
  call.machine.wake();
}

void* fakecuda_host_pointer(const void* pointer, size_t size) {
  CudaCall call(__func__);
  void* const found = call.machine.memory.reach(pointer, size);
  if (found != nullptr) return found;
  fprintf(stderr, "fakecuda: a kernel uses %zu bytes at %p, beyond the end of the allocation\n", size, pointer);
  call.machine.break_device(cudaErrorIllegalAddress);
  const CudaBlock* const block = call.machine.memory.find(pointer);
  return block->mirror + (static_cast<const char*>(pointer) - block->base);
}

int fakecuda_stream_device(void* handle) {
  CudaCall call(__func__);
  const CudaStream* const stream = call.stream(static_cast<cudaStream_t>(handle));
  return stream == nullptr ? -1 : stream->device;
}

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int priority) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  call.machine.make_context(current_device(), call.name);
  CudaStream* const stream = call.machine.make_stream(current_device(), flags, std::clamp(priority, -5, 0));
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  CudaCall call(__func__);
  CudaStream* const stream = call.stream(handle);
  if (stream == nullptr || reinterpret_cast<uintptr_t>(handle) <= 2)
    return CudaCall::fail(cudaErrorInvalidResourceHandle);
  call.machine.destroy_stream(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  CudaCall call(__func__);
  const CudaStream* const stream = call.stream(handle);
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  CudaCall call(__func__);
  const CudaStream* const stream = call.stream(handle);
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  *flags = stream->flags;
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  *device = fakecuda_stream_device(handle);
  return *device < 0 ? CudaCall::fail(cudaErrorInvalidResourceHandle) : cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  CudaStream* const stream = call.stream(handle);
  FAKECUDA_RETURN_IF(refuse_captured(stream));
  return call.machine.query(*stream) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CudaCall call(__func__);
  CudaStream* const stream = call.stream(handle);
  FAKECUDA_RETURN_IF(refuse_captured(stream));
  call.machine.make_context(stream->device, call.name);
  call.machine.synchronize(call.lock, *stream, stream->enqueued);
  call.machine.races.host_saw(*stream);
  return call.device_error();
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  CudaCall call(__func__);
  return enqueue_host_function(call, handle, [=] { function(data); });
}

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  CudaCall call(__func__);
  return enqueue_host_function(call, handle, [=] { function(handle, cudaSuccess, data); });
}
}
