#include "sim/ops/alias.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

#include "sim/runtime/accelerator.h"

namespace sim {

const c10::Storage& Aliases::storage_of(const at::Tensor& tensor) {
  const c10::StorageImpl* const shown = tensor.storage().unsafeGetStorageImpl();
  for (const auto& [known, alias] : storages_) {
    if (known == shown) return alias;
  }
  // Some kernels grow their output for a while, so it has to be possible.
  storages_.emplace_back(
      shown, c10::make_intrusive<c10::StorageImpl>(
                 c10::StorageImpl::use_byte_size_t(), shown->nbytes(),
                 c10::DataPtr(Accelerator::alias(shown->data()), c10::DeviceType::CPU), c10::GetCPUAllocator(), true));
  return storages_.back().second;
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  if (tensor.is_conj()) keys = keys.add(c10::DispatchKey::Conjugate);
  if (tensor.is_neg()) keys = keys.add(c10::DispatchKey::Negative);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_of(tensor)), keys, tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

bool Aliases::share_storage_with(const at::Tensor& tensor) const noexcept {
  const c10::StorageImpl* const asked = tensor.storage().unsafeGetStorageImpl();
  return std::any_of(storages_.begin(), storages_.end(),
                     [&](const auto& known) { return known.second.unsafeGetStorageImpl() == asked; });
}

}  // namespace sim
