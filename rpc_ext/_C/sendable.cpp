#include "sendable.h"

#include <ATen/ops/empty.h>

#include <cstdint>
#include <string>

#include "api/tensors.h"

namespace rpc_ext {
namespace {

void expect_whole_elements(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype == at::kQUInt4x2 || dtype == at::kQUInt2x4) {
    throw TensorFault("a tensor of " + std::string(c10::toString(dtype)) +
                      ", with several elements in a byte, cannot be sent");
  }
  c10::QScheme scheme{};
  try {
    scheme = tensor.qscheme();
  } catch (const c10::Error&) {
    throw TensorFault("a quantized tensor without a scheme cannot be sent");
  }
  if (scheme == c10::kPerTensorAffine || scheme == c10::kPerTensorSymmetric) return;
  for (const at::Tensor& part : {tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()}) {
    expect_memory(part);
    if (part.numel() == 0 && part.storage_offset() != 0) {
      throw TensorFault("the scales of a quantized tensor have an offset beyond their storage");
    }
  }
}

}  // namespace

void expect_storage(const at::Tensor& tensor) {
  if (const auto fault = cudafuture::api::storage_fault(tensor)) throw TensorFault(*fault);
}

void expect_memory(const at::Tensor& tensor) {
  if (const auto fault = cudafuture::api::memory_fault(tensor)) throw TensorFault(*fault);
}

at::Tensor sendable(const at::Tensor& tensor) {
  if (tensor.is_quantized()) expect_whole_elements(tensor);
  if (!tensor.is_meta()) expect_memory(tensor);  // the device maps know no target of "meta"
  if (tensor.numel() != 0 || (tensor.storage_offset() == 0 && !tensor.is_quantized())) return tensor;
  const auto at_start = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
  at_start->set_storage_offset(0);
  if (tensor.is_quantized()) {
    const auto bytes = at::TensorOptions().dtype(at::kByte).device(tensor.device());
    at_start->set_storage_keep_dtype(at::empty({static_cast<std::int64_t>(tensor.itemsize())}, bytes).storage());
  }
  return at::Tensor(at_start).set_requires_grad(tensor.requires_grad());
}

void make_sendable(std::vector<at::Tensor>& tensors) {
  for (at::Tensor& tensor : tensors) {
    if (!tensor.defined()) continue;
    if (tensor.layout() != at::kSparse) {
      tensor = sendable(tensor);
      continue;
    }
    for (const at::Tensor& part : {tensor._indices(), tensor._values()}) {
      if (!sendable(part).is_same(part))
        throw TensorFault("a part of a sparse tensor has an offset beyond its storage");
    }
  }
}

}  // namespace rpc_ext
