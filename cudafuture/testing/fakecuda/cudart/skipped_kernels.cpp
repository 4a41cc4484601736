// CUDA runtime API, "Execution Control": kernels are registered and launched, but their code is for a GPU and is not
// run. torch's operators compute through operators/ instead; a kernel that arrives here counts as skipped. One kernel
// has a meaning without its code: the one of torch.cuda._sleep.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<CallConfiguration> configurations;

// torch loads operators/ when it is imported, as a backend that it finds on PYTHONPATH.
cudaError_t refuse_without_operators(const std::string& kernel) {
  fprintf(stderr,
          "fakecuda: the kernel %s cannot run: torch has not loaded the operators of fakecuda. A process must keep "
          "PYTHONPATH, and add to it, and must not set TORCH_DEVICE_BACKEND_AUTOLOAD=0\n",
          kernel.c_str());
  return CudaCall::fail(cudaErrorLaunchFailure);
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t handle) {
  CudaCall call("cudaLaunchKernel");
  FAKECUDA_RETURN_IF(call.device_error());
  CudaStream* const stream = call.stream(handle);
  // A kernel is launched in the context of the current device, to which its stream must belong.
  if (stream == nullptr || stream->device != current_device()) return CudaCall::fail(cudaErrorInvalidResourceHandle);
  const std::string name = Registry::get().kernel_name(function);
  if (!Registry::get().operators_are_redirected) return refuse_without_operators(name);
  StreamOperation operation;
  if (name.find("spin_kernel") != std::string::npos) {
    operation.kind = StreamOperation::Kind::kSleep;
    operation.duration = std::chrono::nanoseconds(*static_cast<int64_t*>(arguments[0]));  // cycles of 1 GHz
    ++call.machine.counters.kernels_run;
  } else {
    ++call.machine.counters.kernels_skipped;
    ++call.machine.skipped[name];
    if (call.machine.settings.verbose) fprintf(stderr, "fakecuda: the kernel %s is not run\n", name.c_str());
    operation.run = [] {};
  }
  return call.enqueue(*stream, std::move(operation));
}

}  // namespace

extern "C" {

// ---- what the compiler generates for a program with kernels
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Registry::get().add_kernel(host, name);
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const CallConfiguration configuration = configurations.back();
  configurations.pop_back();
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

// ---- launches
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(reinterpret_cast<const void*>(kernel), arguments, stream);
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, arguments, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void** arguments, size_t,
                                        cudaStream_t stream) {
  return launch(function, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  return launch(function, arguments, configuration->stream);
}

// ---- attributes, of any kernel
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}
}
