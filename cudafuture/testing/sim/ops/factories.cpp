// Tensors without contents: what every other factory of torch is made of.
#include <ATen/native/TensorFactories.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "sim/ops/tensors.h"

namespace sim {
namespace {

void expect_plain(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(c10::kStrided) == c10::kStrided, "simulated devices have no ", *layout,
                              " tensors");
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<c10::MemoryFormat> format) {
  expect_plain(layout, pin_memory);
  return new_tensor(device_index(device), size, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  expect_plain(layout, pin_memory);
  return new_tensor(device_index(device), size, stride, c10::dtype_or_default(dtype));
}

// Zeros that take no memory: derivatives of what does not depend on the input.
at::Tensor efficient_zeros(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                           std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                           std::optional<bool> pin_memory) {
  expect_plain(layout, pin_memory);
  at::native::ZeroTensorAllocator allocator(torch_device(device_index(device)));
  constexpr c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), std::nullopt);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
}

}  // namespace sim
