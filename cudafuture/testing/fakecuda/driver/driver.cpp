// CUDA driver API: what torch and its users take from libcuda.so.1, by linking or through cudaGetDriverEntryPoint.
#include <cstring>
#include <iterator>

#include "fakecuda/cudart/call.h"
#include "fakecuda/driver/virtual_memory.h"

using namespace fakecuda;

extern "C" int fakecuda_unsupported(const char* function);

namespace {

// Values of the driver's enumerations, which the runtime's headers lack (cuda.h).
enum PointerAttribute { kContext = 1, kMemoryType = 2, kBufferId = 7, kDeviceOrdinal = 9 };

void* context_of(int device) { return reinterpret_cast<void*>(static_cast<intptr_t>(device + 1)); }

}  // namespace

extern "C" {

int cuInit(unsigned) {
  const CudaCall call(__func__);  // starts the machine
  return cudaSuccess;
}

int cuDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return cudaSuccess;
}

int cuDeviceGetCount(int* count) {
  constexpr int kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED
  return CudaMachine::exists() ? cudaGetDeviceCount(count) : kNotInitialized;
}

int cuDeviceGetUuid(char* uuid, int device) {
  std::memset(uuid, 0, 16);
  uuid[15] = static_cast<char>(device);
  return cudaSuccess;
}

// Attributes of the driver that the runtime has no name for; none of them is supported.
int cuDeviceGetAttribute(int* value, int, int) {
  *value = 0;
  return cudaSuccess;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  const CudaCall call(__func__);
  if (device < 0 || device >= call.machine.device_count()) return cudaErrorInvalidDevice;
  *flags = 0;
  *is_active = call.machine.has_context(device);
  return cudaSuccess;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const CudaCall call(__func__);
  call.machine.make_context(device, call.name);
  *context = context_of(device);
  return cudaSuccess;
}

int cuCtxGetCurrent(void** context) {
  *context = context_of(current_device());
  return cudaSuccess;
}

int cuCtxSetCurrent(void*) { return cudaSuccess; }

int cuGetErrorString(int error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return cudaSuccess;
}

int cuGetErrorName(int error, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return cudaSuccess;
}

int cuStreamCreate(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithFlags(stream, flags); }
int cuStreamDestroy_v2(cudaStream_t stream) { return cudaStreamDestroy(stream); }

int cuMemGetAddressRange_v2(void** base, size_t* size, const void* pointer) {
  CudaCall call(__func__);
  const CudaBlock* const block = call.machine.memory.find(pointer);
  if (block == nullptr) return cudaErrorInvalidValue;
  if (base != nullptr) *base = block->base;
  if (size != nullptr) *size = block->size;
  return cudaSuccess;
}

int cuPointerGetAttribute(void* value, int attribute, const void* pointer) {
  CudaCall call(__func__);
  const CudaBlock* const block = call.machine.memory.find(pointer);
  if (block == nullptr) return cudaErrorInvalidValue;
  switch (attribute) {
    case kContext:
      *static_cast<void**>(value) = context_of(block->device);
      return cudaSuccess;
    case kMemoryType:
      *static_cast<int*>(value) = block->is_of_device() ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
      return cudaSuccess;
    case kBufferId:
      *static_cast<uint64_t*>(value) = reinterpret_cast<uint64_t>(block->base);
      return cudaSuccess;
    case kDeviceOrdinal:
      *static_cast<int*>(value) = block->device;
      return cudaSuccess;
    default:
      return fakecuda_unsupported("cuPointerGetAttribute of this attribute");
  }
}

// Functions that exist so that libraries which link them can be loaded.
#define UNSUPPORTED(name) \
  int name() { return fakecuda_unsupported(#name); }
UNSUPPORTED(cuFuncGetAttribute)
UNSUPPORTED(cuFuncSetAttribute)
UNSUPPORTED(cuFuncSetCacheConfig)
UNSUPPORTED(cuLaunchCooperativeKernel)
UNSUPPORTED(cuLaunchKernel)
UNSUPPORTED(cuLinkAddData_v2)
UNSUPPORTED(cuLinkComplete)
UNSUPPORTED(cuLinkCreate_v2)
UNSUPPORTED(cuModuleGetFunction)
UNSUPPORTED(cuModuleLoad)
UNSUPPORTED(cuModuleLoadData)
UNSUPPORTED(cuModuleLoadDataEx)
UNSUPPORTED(cuModuleUnload)
UNSUPPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNSUPPORTED(cuTensorMapEncodeTiled)
#undef UNSUPPORTED

// The answer for a driver function that does not exist here; torch 2.14 probes some by name. As the driver does, it
// returns an error and leaves the runtime's last error alone (CUDA runtime API, 6.26 "Interactions with the Driver
// API").
int fakecuda_missing_driver_function() { return cudaErrorNotSupported; }

// ---- libnvidia-ml.so.1: no links between devices
int nvmlInit_v2() { return cudaSuccess; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return cudaSuccess;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return cudaSuccess;
}
#define UNSUPPORTED(name) \
  int name() { return fakecuda_unsupported(#name); }
UNSUPPORTED(nvmlDeviceGetGpuFabricInfoV)
UNSUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
UNSUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
UNSUPPORTED(nvmlSystemGetCudaDriverVersion_v2)
#undef UNSUPPORTED

// ---- the driver's functions by name
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  struct Entry {
    const char* name;
    void* function;
  };
#define ENTRY(function)                           \
  {                                               \
    #function, reinterpret_cast<void*>(&function) \
  }
  static const Entry entries[] = {
      ENTRY(cuCtxGetCurrent),
      ENTRY(cuCtxSetCurrent),
      ENTRY(cuDeviceGet),
      ENTRY(cuDeviceGetAttribute),
      ENTRY(cuDevicePrimaryCtxGetState),
      ENTRY(cuGetErrorString),
      ENTRY(cuMemAddressFree),
      ENTRY(cuMemAddressReserve),
      ENTRY(cuMemCreate),
      ENTRY(cuMemGetAllocationGranularity),
      ENTRY(cuMemMap),
      ENTRY(cuMemRelease),
      ENTRY(cuMemSetAccess),
      ENTRY(cuMemUnmap),
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&cuMemGetAddressRange_v2)},
  };
#undef ENTRY
  const auto is_named = [&](const Entry& entry) { return std::strcmp(entry.name, name) == 0; };
  const auto* const found = std::find_if(std::begin(entries), std::end(entries), is_named);
  const bool is_known = found != std::end(entries);
  if (!is_known && CudaMachine::get().settings.verbose) fprintf(stderr, "fakecuda: the driver's %s is missing\n", name);
  *function = is_known ? found->function : reinterpret_cast<void*>(&fakecuda_missing_driver_function);
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}
}
