#include "part.h"

#include <ATen/ops/from_blob.h>

#include <stdexcept>

namespace rpc_ext {

at::Tensor alone(const at::Tensor& data, std::int64_t at, std::int64_t length) {
  if (!data.is_cpu() || data.scalar_type() != at::kByte || data.dim() != 1 || !data.is_contiguous()) {
    throw std::invalid_argument("expected a contiguous, one-dimensional tensor of torch.uint8 on the host");
  }
  if (at < 0 || length < 0 || at > data.numel() || length > data.numel() - at) {
    throw std::out_of_range("the part does not lie within the tensor");
  }
  return at::from_blob(data.mutable_data_ptr<std::uint8_t>() + at, {length}, [data](void*) {}, at::kByte);
}

}  // namespace rpc_ext
