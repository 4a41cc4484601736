// Functions of the CUDA or HIP runtime that c10 does not wrap. They are available only if torch has loaded that
// runtime.
#pragma once

#include <dlfcn.h>

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

}  // namespace cudafuture
