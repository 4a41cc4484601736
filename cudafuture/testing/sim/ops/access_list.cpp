#include "sim/ops/access_list.h"

#include <cstddef>

namespace sim {
namespace {

// From the first byte of any element to the last one: what lies between the elements of a strided view counts too.
MemoryAccess range_of(const at::Tensor& tensor, bool writes) {
  std::int64_t last = 0;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (std::size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
  const std::size_t item = tensor.dtype().itemsize();
  const auto storage = reinterpret_cast<std::uintptr_t>(tensor.storage().data());
  const std::uintptr_t begin = storage + static_cast<std::size_t>(tensor.storage_offset()) * item;
  return {begin, begin + (static_cast<std::size_t>(last) + 1) * item, writes};
}

bool holds(const MemoryAccess& outer, const MemoryAccess& inner) {
  return outer.begin <= inner.begin && inner.end <= outer.end && (outer.writes || !inner.writes);
}

}  // namespace

void AccessList::add(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return;
  const MemoryAccess access = range_of(tensor, writes);
  bytes_ += static_cast<double>(tensor.nbytes());
  // An in-place operation names its tensor twice; a race would show twice.
  for (MemoryAccess& known : accesses_) {
    if (holds(known, access)) return;
    if (holds(access, known)) {
      known = access;
      return;
    }
  }
  accesses_.push_back(access);
}

}  // namespace sim
