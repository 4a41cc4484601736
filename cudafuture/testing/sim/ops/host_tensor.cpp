#include "sim/ops/host_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <cstring>

namespace sim {

at::Tensor host_copy(const at::Tensor& tensor) {
  // The number of `tensor + 1`: no other code has a reference to it.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  if (tensor.dim() == 0 && !tensor.is_conj() && !tensor.is_neg()) {
    at::Tensor copy = at::detail::empty_cpu({}, tensor.scalar_type());
    std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.itemsize());
    return copy;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::DisableRecordFunctionGuard unobserved;
  return tensor.clone();
}

}  // namespace sim
