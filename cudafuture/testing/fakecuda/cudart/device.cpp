// CUDA runtime API, "Device Management", "Peer Device Memory Access" and "Version Management".
#include <cstdio>
#include <cstring>

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

// The attributes that torch and NCCL's callers ask for; a device of compute capability 9.0 with four multiprocessors.
constexpr int kMultiprocessors = 4;
constexpr int kThreadsPerBlock = 1024;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kRegisters = 65536;
constexpr int kSharedMemory = 49152;        // bytes for each block
constexpr int kOptInSharedMemory = 232448;  // bytes for each block that asks for more
constexpr int kClockKilohertz = 1000000;    // torch.cuda._sleep counts cycles: a cycle is a nanosecond
constexpr int kGreatestPriority = -5;       // as on every current device

bool is_device(int device) { return device >= 0 && device < CudaMachine::get().device_count(); }

}  // namespace

extern "C" {

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaGetDeviceCount(int* count) {
  const CudaCall call(__func__);
  *count = call.machine.device_count();
  return *count == 0 ? CudaCall::fail(cudaErrorNoDevice) : cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

// From CUDA 12 on, cudaSetDevice initialises the runtime and the primary context of the device.
cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return CudaCall::fail(cudaErrorInvalidDevice);
  const CudaCall call(__func__);
  call.machine.make_context(device, call.name);
  current_device() = device;
  return call.device_error();
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_device(device)) return CudaCall::fail(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "fakecuda");
  properties->uuid.bytes[15] = static_cast<char>(device);
  properties->totalGlobalMem = CudaMachine::get().settings.memory;
  properties->sharedMemPerBlock = kSharedMemory;
  properties->sharedMemPerBlockOptin = kOptInSharedMemory;
  properties->sharedMemPerMultiprocessor = kOptInSharedMemory + 1024;
  properties->regsPerBlock = properties->regsPerMultiprocessor = kRegisters;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = kThreadsPerBlock;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kThreadsPerBlock;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->major = 9;
  properties->multiProcessorCount = kMultiprocessors;
  properties->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = properties->canMapHostMemory = properties->concurrentKernels = 1;
  properties->streamPrioritiesSupported = 1;
  properties->asyncEngineCount = 2;
  properties->l2CacheSize = 1 << 20;
  properties->pciBusID = device + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!is_device(device)) return CudaCall::fail(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kThreadsPerBlock;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrClockRate:
      *value = kClockKilohertz;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
      *value = 1;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kSharedMemory;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kOptInSharedMemory;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = kThreadsPerMultiprocessor;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = kGreatestPriority;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  CudaCall call(__func__);
  FAKECUDA_RETURN_IF(call.refuse_in_captures());
  FAKECUDA_RETURN_IF(call.refuse_with_captures_of(current_device()));
  call.machine.make_context(current_device(), call.name);
  call.machine.synchronize_device(call.lock, current_device());
  return call.device_error();
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
