// aten::copy_ between tensors of devices and of the host. torch copies bytes without a kernel; all else needs one.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Copy.h>
#include <c10/core/DeviceGuard.h>

#include "fakecuda/operators/copy.h"
#include "fakecuda/operators/redirect.h"

namespace fakecuda {
namespace {

// Returns true if torch copies without a kernel, by cudaMemcpyAsync.
bool is_plain(const at::Tensor& to, const at::Tensor& from) {
  if (!to.is_cuda() || !from.is_cuda()) return true;
  if (to.layout() != at::kStrided || from.layout() != at::kStrided) return true;
  if (to.scalar_type() != from.scalar_type() || to.is_conj() != from.is_conj() || to.is_neg() != from.is_neg()) {
    return false;
  }
  const bool is_alike = to.strides() == from.strides() && to.is_non_overlapping_and_dense();
  return to.sizes() == from.sizes() && (is_alike || (to.is_contiguous() && from.is_contiguous()));
}

}  // namespace

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (is_plain(to, from)) return at::native::copy_(to, from, non_blocking);
  if (to.device() == from.device()) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    torch::jit::Stack stack{to, from, non_blocking};
    redirect(op, {}, &stack);
    return to;
  }
  // Between devices: converted on the source's device, then copied as bytes, as torch does.
  at::Tensor converted;
  {
    const c10::DeviceGuard there(from.device());
    converted = at::empty(to.sizes(), to.options().device(from.device()));
    converted.copy_(from.expand(to.sizes()));
  }
  at::Tensor arrived = at::empty(to.sizes(), to.options());
  at::native::copy_(arrived, converted, non_blocking);
  return to.copy_(arrived);
}

}  // namespace fakecuda
