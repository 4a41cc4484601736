#include "fakecuda/driver/virtual_memory.h"

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

constexpr size_t kGranularity = size_t{2} << 20;  // bytes, as on current devices
constexpr int kLocationId = 3;  // in CUmemAllocationProp: type, handle types, location type, location id

}  // namespace

extern "C" {

int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) {
  *bytes = kGranularity;
  return cudaSuccess;
}

int cuMemAddressReserve(char** base, size_t size, size_t, void*, unsigned long long) {
  CudaCall call(__func__);
  *base = call.machine.memory.reserve(size, current_device());
  return *base == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

int cuMemAddressFree(char* base, size_t size) {
  CudaCall call(__func__);
  return call.machine.memory.free_reserved(base, size) ? cudaSuccess : cudaErrorInvalidValue;
}

int cuMemCreate(Physical** handle, size_t size, const int* properties, unsigned long long) {
  CudaCall call(__func__);
  const int device = properties[kLocationId];
  if (device < 0 || device >= call.machine.device_count()) return cudaErrorInvalidDevice;
  call.machine.make_context(device, call.name);
  if (call.machine.takes_a_failure()) return cudaErrorMemoryAllocation;
  *handle = call.machine.memory.make_physical(size, device);
  return *handle == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}

int cuMemRelease(Physical* physical) {
  CudaCall call(__func__);
  call.machine.memory.release_physical(physical);
  return cudaSuccess;
}

int cuMemMap(char* at, size_t size, size_t, Physical* physical, unsigned long long) {
  CudaCall call(__func__);
  return call.machine.memory.map(at, size, *physical) ? cudaSuccess : cudaErrorInvalidValue;
}

int cuMemSetAccess(void*, size_t, const void*, size_t) { return cudaSuccess; }

// The driver's documentation asks for the work on the memory to be over; torch synchronises before.
int cuMemUnmap(char* at, size_t size) {
  CudaCall call(__func__);
  call.machine.races.forget(at, size);
  return call.machine.memory.unmap(at, size) ? cudaSuccess : cudaErrorInvalidValue;
}
}
