// Functions of the CUDA or HIP runtime that c10 does not wrap. They are available only if torch has loaded that
// runtime.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstddef>

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

// Returns how many libraries the process has loaded so far.
inline unsigned long long loaded_libraries() noexcept {
  unsigned long long count = 0;
  const auto first = [](dl_phdr_info* info, std::size_t, void* result) {
    *static_cast<unsigned long long*>(result) = info->dlpi_adds;
    return 1;
  };
  dl_iterate_phdr(first, &count);
  return count;
}

// True if this process has called cuInit, directly or not. Has no effect itself: the driver answers before that, too.
inline bool is_cuda_initialized() noexcept {
  constexpr int kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED
  using GetCount = int (*)(int* count);
  static std::atomic<bool> is_initialized{false};
  static std::atomic<GetCount> get_count{nullptr};
  static std::atomic<unsigned long long> looked_at{0};  // a search for a library that is not loaded reads folders
  if (is_initialized.load(std::memory_order_relaxed)) return true;
  if (get_count.load() == nullptr) {
    const unsigned long long loaded = loaded_libraries();
    if (looked_at.load() == loaded) return false;
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver != nullptr) get_count = reinterpret_cast<GetCount>(dlsym(driver, "cuDeviceGetCount"));
    // ROCm, which torch calls CUDA too, has another driver; CUDA's runtime loads its driver when it is first used.
    const bool is_cuda = driver != nullptr || dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD) != nullptr;
    if (!is_cuda) is_initialized = true;
    if (driver == nullptr) looked_at = loaded;
    if (!is_cuda || driver == nullptr) return !is_cuda;
  }
  int count = 0;
  const GetCount ask = get_count.load();
  is_initialized = ask == nullptr || ask(&count) != kNotInitialized;
  return is_initialized;
}

}  // namespace cudafuture
