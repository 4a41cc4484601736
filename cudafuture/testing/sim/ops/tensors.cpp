#include "sim/ops/tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/util/Exception.h>

#include "sim/device/memory.h"
#include "sim/runtime/accelerator.h"

namespace sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

}  // namespace

int device_index(std::optional<c10::Device> device) {
  const int index = device.has_value() && device->has_index() ? device->index() : current_device();
  const int count = Accelerator::get().device_count();
  TORCH_CHECK(count > 0, "there are no simulated devices: call sim.enable() first");
  TORCH_CHECK_INDEX(index < count, "there is no ", torch_device(index), ": sim.enable() made ", count, " devices");
  return index;
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.has_storage() && Accelerator::get().is_pinned(tensor.storage().data());
}

at::Tensor new_tensor(int device, c10::IntArrayRef sizes, c10::ScalarType dtype,
                      std::optional<c10::MemoryFormat> format) {
  const DeviceScope scope(device);
  return at::detail::empty_generic(sizes, device_allocator(), kKeys, dtype, format);
}

at::Tensor new_tensor(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype) {
  const DeviceScope scope(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, dtype);
}

void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::IntArrayRef> strides) {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (impl->sizes() == sizes && (!strides.has_value() || impl->strides() == *strides)) return;
  const auto offset = static_cast<std::size_t>(impl->storage_offset());
  const std::size_t item = impl->itemsize();
  std::size_t wanted = 0;
  if (strides.has_value()) {
    impl->set_sizes_and_strides(sizes, *strides);
    wanted = at::detail::computeStorageNbytes(sizes, *strides, item, offset);
  } else {
    impl->set_sizes_contiguous(sizes);
    wanted = at::detail::computeStorageNbytesContiguous(sizes, item, offset);
  }
  const c10::Storage& storage = tensor.storage();
  if (impl->numel() == 0 || wanted <= storage.nbytes()) return;
  TORCH_CHECK(storage.resizable(), "Trying to resize storage that is not resizable");
  at::native::resize_bytes_nocuda(storage, static_cast<std::int64_t>(wanted));
}

}  // namespace sim
