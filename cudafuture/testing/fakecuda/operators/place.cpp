#include "fakecuda/operators/place.h"

namespace fakecuda {

Place::Place(const at::Tensor& tensor)
    : data_(tensor.numel() == 0 ? nullptr : tensor.data_ptr()),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      dtype_(tensor.scalar_type()),
      is_conjugate_(tensor.is_conj()),
      is_negative_(tensor.is_neg()) {}

size_t Place::bytes() const {
  if (data_ == nullptr) return 0;
  int64_t last = 0;  // element
  for (size_t i = 0; i < sizes_.size(); ++i) last += (sizes_[i] - 1) * strides_[i];
  return static_cast<size_t>(last + 1) * c10::elementSize(dtype_);
}

at::Tensor Place::view() const {
  const auto options = at::TensorOptions().dtype(dtype_).device(c10::kCPU);
  if (data_ == nullptr) return at::empty_strided(sizes_, strides_, options);
  at::Tensor tensor = at::from_blob(fakecuda_host_pointer(data_, bytes()), sizes_, strides_, options);
  tensor._set_conj(is_conjugate_);
  tensor._set_neg(is_negative_);
  return tensor;
}

}  // namespace fakecuda
