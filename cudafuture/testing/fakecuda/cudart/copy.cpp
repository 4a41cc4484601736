// CUDA runtime API, "Memory Management": copies and fills. They return early or late as "API synchronization behavior"
// states.
#include <cstring>
#include <memory>
#include <string>

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

struct Bytes {
  void* to = nullptr;
  const void* from = nullptr;
  size_t size = 0;
};

// Returns the address at which the host reaches memory that an operation uses; breaks the device if there is none.
void* reach(const void* pointer, size_t size, const char* name) {
  CudaCall call(name);
  void* const found = call.machine.memory.reach(pointer, size);
  if (found == nullptr) {
    fprintf(stderr, "fakecuda: %s of %zu bytes at %p reaches beyond the end of the allocation\n", name, size, pointer);
    call.machine.break_device(cudaErrorIllegalAddress);
  }
  return found;
}

void move(const Bytes& bytes, const char* name) {
  void* const to = reach(bytes.to, bytes.size, name);
  const void* const from = reach(bytes.from, bytes.size, name);
  if (to != nullptr && from != nullptr) std::memmove(to, from, bytes.size);
}

void add_access(CudaCall& call, std::vector<MemoryAccess>& accesses, const void* begin, size_t size, bool writes) {
  if (call.machine.memory.find(begin) != nullptr) accesses.push_back(MemoryAccess::of(begin, size, writes));
}

cudaError_t copy(CudaCall& call, const Bytes& bytes, cudaStream_t handle, bool waits, const SitePtr& site) {
  FAKECUDA_RETURN_IF(call.device_error());
  if (bytes.size == 0) return cudaSuccess;
  CudaStream* const stream = call.stream(handle);
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  const bool from_pageable = call.machine.memory.find(bytes.from) == nullptr;
  const bool to_pageable = call.machine.memory.find(bytes.to) == nullptr;
  StreamOperation operation;
  operation.site = site;
  add_access(call, operation.accesses, bytes.from, bytes.size, false);
  add_access(call, operation.accesses, bytes.to, bytes.size, true);
  const char* const name = call.name;
  if (from_pageable && stream->capture == nullptr) {  // staged: the source may be overwritten when the call returns
    auto staged = std::make_shared<std::string>(static_cast<const char*>(bytes.from), bytes.size);
    operation.run = [=] { move({bytes.to, staged->data(), bytes.size}, name); };
  } else {
    operation.run = [=] { move(bytes, name); };
  }
  ++call.machine.counters.copies;
  FAKECUDA_RETURN_IF(call.enqueue(*stream, std::move(operation)));
  if ((waits || to_pageable) && stream->capture == nullptr) {
    call.machine.synchronize(call.lock, *stream, stream->enqueued);
    call.machine.races.host_saw(*stream);
  }
  return call.device_error();
}

SitePtr here(const char* name) { return CudaMachine::get().races.here(name); }

}  // namespace

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  const SitePtr site = here(__func__);
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  return copy(call, {to, from, size}, nullptr, true, site);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  const SitePtr site = here(__func__);
  CudaCall call(__func__);
  return copy(call, {to, from, size}, stream, false, site);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t size, cudaStream_t stream) {
  const SitePtr site = here(__func__);
  CudaCall call(__func__);
  return copy(call, {to, from, size}, stream, false, site);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  const SitePtr site = here(__func__);
  CudaCall call(__func__);
  for (size_t row = 0; row < height; ++row) {
    auto* const row_to = static_cast<char*>(to) + row * to_pitch;
    const auto* const row_from = static_cast<const char*>(from) + row * from_pitch;
    FAKECUDA_RETURN_IF(copy(call, {row_to, row_from, width}, stream, false, site));
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t handle) {
  const SitePtr site = here(__func__);
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  CudaStream* const stream = call.stream(handle);
  if (stream == nullptr) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  StreamOperation operation;
  operation.site = site;
  add_access(call, operation.accesses, to, size, true);
  operation.run = [=] {
    if (void* const found = reach(to, size, "cudaMemset")) std::memset(found, value, size);
  };
  return call.enqueue(*stream, std::move(operation));
}

cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }
}
