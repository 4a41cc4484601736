// The byte ranges that a piece of work reads and writes, each range once.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "sim/runtime/accelerator.h"

namespace sim {

class AccessList {
 public:
  void read(const at::Tensor& tensor) { add(tensor, false); }
  void write(const at::Tensor& tensor) { add(tensor, true); }
  void add(const at::Tensor& tensor, bool writes);

  double bytes() const noexcept { return bytes_; }  // of all elements that are read or written
  bool empty() const noexcept { return accesses_.empty(); }
  std::vector<MemoryAccess> take() && { return std::move(accesses_); }

 private:
  std::vector<MemoryAccess> accesses_;
  double bytes_ = 0;
};

}  // namespace sim
