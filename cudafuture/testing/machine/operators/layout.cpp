#include "machine/operators/layout.h"

#include <algorithm>

namespace machine {
namespace {

// Strides for new memory. Those of an expanded tensor would make elements share it.
c10::SmallVector<std::int64_t, 5> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return {tensor.strides().begin(), tensor.strides().end()};
  c10::SmallVector<std::int64_t, 5> strides(static_cast<std::size_t>(tensor.dim()));
  std::int64_t stride = 1;
  for (std::size_t i = strides.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(tensor.sizes()[i], 1);
  }
  return strides;
}

}  // namespace

TensorLayout::TensorLayout(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  defined = true;
  dtype = tensor.scalar_type();
  sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  strides = dense_strides(tensor);
}

}  // namespace machine
