// The place of a tensor in device memory. It does not keep the memory alive, as a kernel does not: without
// record_stream the memory may be in other hands when the kernel runs.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "fakecuda/devices/launch.h"

namespace fakecuda {

using namespace machine;

class Place {
 public:
  explicit Place(const at::Tensor& tensor);

  // A tensor of the host at the same bytes. Call it where a kernel runs.
  at::Tensor view() const;
  MemoryAccess access(bool writes) const { return MemoryAccess::of(data_, bytes(), writes); }

 private:
  size_t bytes() const;  // from the first to the last

  void* data_;  // null: no elements
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
  at::ScalarType dtype_;
  bool is_conjugate_;
  bool is_negative_;
};

}  // namespace fakecuda
