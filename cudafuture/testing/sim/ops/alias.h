// Tensors of the host's that lie over what tensors of a device show: what work computes on.
//
// An alias owns nothing, so work that runs after its memory was freed reads what is there by then, as on a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <utility>

namespace sim {

// The aliases of one call. Tensors that share a storage get aliases that share one, since kernels ask for that.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);
  bool share_storage_with(const at::Tensor& tensor) const noexcept;  // a tensor of the host's

 private:
  const c10::Storage& storage_of(const at::Tensor& tensor);

  c10::SmallVector<std::pair<const c10::StorageImpl*, c10::Storage>, 4> storages_;
};

}  // namespace sim
