// Kernels, and the hooks of operators/, that libraries register when they are loaded. They are apart from the machine,
// which starts with the first call. Until then a process may fork, and its children may use CUDA.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_map>

#include "machine/site.h"

namespace fakecuda {

class Registry {
 public:
  // Makes the site of a call (operators/site.cpp): the operation's name and the stack of the host. Needs Python's lock,
  // so it is called without the machine's.
  using MakeSite = machine::SitePtr (*)(const char* operation);

  // The registry of the process. It is never destroyed: threads use it until the process has ended.
  static Registry& get() {
    static auto* const registry = new Registry;
    return *registry;
  }

  // `function` is the function of the host that stands for the kernel.
  void add_kernel(const void* function, const char* name) {
    const std::lock_guard lock(mutex_);
    kernels_[function] = name;
  }

  std::string kernel_name(const void* function) {
    const std::lock_guard lock(mutex_);
    return kernels_[function];
  }

  std::atomic<bool> operators_are_redirected{false};
  std::atomic<MakeSite> make_site{nullptr};

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::string> kernels_;
};

}  // namespace fakecuda
