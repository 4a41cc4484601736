// Random numbers: the host's kernels make them, from seeds that the generators of the device give.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>

namespace sim {

// A generator of the host's in place of one of a device; with none, in place of the device's default one.
c10::IValue host_generator(const c10::IValue& ours, int device);

// For kernels that take no generator: the host's default one starts from `seed`, and is as it was afterwards.
class SeededHost {
 public:
  explicit SeededHost(std::uint64_t seed);
  SeededHost(const SeededHost&) = delete;
  SeededHost& operator=(const SeededHost&) = delete;
  ~SeededHost();

 private:
  c10::intrusive_ptr<c10::TensorImpl> before_;
};

}  // namespace sim
