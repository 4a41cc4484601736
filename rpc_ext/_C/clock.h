#pragma once

#include <chrono>

namespace rpc_ext {

// The monotonic clock, in seconds: that of Python's time.perf_counter().
inline double now() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace rpc_ext
