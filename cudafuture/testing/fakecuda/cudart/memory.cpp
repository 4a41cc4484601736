// CUDA runtime API, "Memory Management": allocation. Copies are in copy.cpp.
#include <cstring>

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t size) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  call.machine.make_context(current_device(), call.name);
  *pointer = nullptr;
  if (size == 0) return cudaSuccess;
  if (!call.machine.takes_a_failure()) *pointer = call.machine.memory.allocate(size, current_device());
  return *pointer == nullptr ? CudaCall::fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

// Waits for the device: work that uses the memory is over when cudaFree returns.
cudaError_t cudaFree(void* pointer) {
  CudaCall call(__func__);
  call.machine.make_context(current_device(), call.name);
  if (pointer == nullptr) return cudaSuccess;
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  const CudaBlock* block = call.machine.memory.find(pointer);
  if (block == nullptr || block->base != pointer) return CudaCall::fail(cudaErrorInvalidValue);
  call.machine.synchronize_device(call.lock, block->device);
  block = call.machine.memory.find(pointer);  // the lock was free meanwhile
  if (block == nullptr) return CudaCall::fail(cudaErrorInvalidValue);
  call.machine.races.forget(block->base, block->size);
  call.machine.memory.release(CudaBlock(*block));
  return call.device_error();
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const CudaCall call(__func__);
  call.machine.make_context(current_device(), call.name);
  *total = call.machine.memory.total();
  *free = *total - call.machine.memory.used(current_device());
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  call.machine.make_context(current_device(), call.name);
  *pointer = call.machine.takes_a_failure() ? nullptr : call.machine.memory.allocate_pinned(size, current_device());
  return *pointer == nullptr ? CudaCall::fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }

cudaError_t cudaFreeHost(void* pointer) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  const CudaBlock* block = call.machine.memory.find(pointer);
  if (block == nullptr || block->kind != CudaBlock::Kind::kPinned) return CudaCall::fail(cudaErrorInvalidValue);
  for (int device = 0; device < call.machine.device_count(); ++device) {
    call.machine.synchronize_device(call.lock, device);
  }
  block = call.machine.memory.find(pointer);
  if (block == nullptr) return CudaCall::fail(cudaErrorInvalidValue);
  call.machine.races.forget(block->base, block->size);
  call.machine.memory.release(CudaBlock(*block));
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* pointer, size_t size, unsigned) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  const bool is_new = call.machine.memory.add_registered(static_cast<char*>(pointer), size, current_device());
  return is_new ? cudaSuccess : CudaCall::fail(cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void* pointer) {
  CudaCall call(__func__);
  const CudaBlock* const block = call.machine.memory.find(pointer);
  if (block == nullptr || block->kind != CudaBlock::Kind::kRegistered) {
    return CudaCall::fail(cudaErrorHostMemoryNotRegistered);
  }
  call.machine.races.forget(block->base, block->size);
  call.machine.memory.release(CudaBlock(*block));
  return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;  // unified addressing
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.device_error());
  std::memset(attributes, 0, sizeof *attributes);
  const CudaBlock* const block = call.machine.memory.find(pointer);
  const bool is_of_device = block != nullptr && block->is_of_device();
  attributes->type = block == nullptr ? cudaMemoryTypeUnregistered
                     : is_of_device   ? cudaMemoryTypeDevice
                                      : cudaMemoryTypeHost;
  attributes->device = block == nullptr ? -2 : block->device;  // cudaInvalidDeviceId
  attributes->devicePointer = block == nullptr ? nullptr : const_cast<void*>(pointer);
  attributes->hostPointer = is_of_device ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}
}
