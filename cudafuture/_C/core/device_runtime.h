// Functions of the CUDA or HIP runtime that c10 does not wrap. They are available only if torch has loaded that
// runtime.
#pragma once

#include <dlfcn.h>

#include <atomic>

namespace cudafuture {

// Returns the function `cuda_name` of CUDA's runtime, or `hip_name` of HIP's; null if torch loaded neither.
template <class Function>
Function find_in_device_runtime(const char* cuda_name, const char* hip_name) noexcept {
  const auto find = [](const char* library, const char* name) -> void* {
    void* const loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    return loaded == nullptr ? nullptr : dlsym(loaded, name);
  };
  void* found = find("libc10_cuda.so", cuda_name);
  if (found == nullptr) found = find("libc10_hip.so", hip_name);
  return reinterpret_cast<Function>(found);
}

// True if this process has called cuInit, directly or not. Has no effect itself: the driver answers before that, too.
inline bool is_cuda_initialized() noexcept {
  constexpr int kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED
  using GetCount = int (*)(int* count);
  static std::atomic<bool> is_initialized{false};
  if (is_initialized.load(std::memory_order_relaxed)) return true;
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) {
    // ROCm, which torch calls CUDA too, has another driver, and the runtime of CUDA loads it when it is used.
    return dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr;
  }
  const auto get_count = reinterpret_cast<GetCount>(dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  is_initialized = get_count == nullptr || get_count(&count) != kNotInitialized;
  return is_initialized;
}

}  // namespace cudafuture
