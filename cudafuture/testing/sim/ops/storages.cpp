// Operators that change which memory a tensor shows, and how much of it; and which streams use it.
#include <ATen/native/Resize.h>
#include <ATen/ops/set_native.h>
#include <c10/core/Stream.h>
#include <torch/library.h>

#include "sim/device/current.h"
#include "sim/device/memory.h"
#include "sim/ops/tensors.h"

namespace sim {
namespace {

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  resize_tensor(self, size, std::nullopt);
  if (format.has_value()) {
    TORCH_CHECK(*format != c10::MemoryFormat::Preserve, "Unsupported memory format ", *format);
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_to_part(at::Tensor& self, c10::Storage source, std::int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  resize_tensor(self, size, stride.data() == nullptr ? std::nullopt : std::optional(stride));
  return self;
}

at::Tensor& set_to_storage(at::Tensor& self, c10::Storage source) {
  const auto elements = static_cast<std::int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_to_part(self, std::move(source), 0, elements, {});
}

at::Tensor& set_to_nothing(at::Tensor& self) {
  const DeviceScope scope(self.device().index());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return set_to_part(self, std::move(nothing), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  TORCH_CHECK(stream.device() == self.device(), "a stream of ", stream.device(), " cannot use a tensor of ",
              self.device());
  const void* const memory = self.storage().data();
  if (memory != nullptr) Accelerator::get().record_use(memory, stream_name(stream));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_to_part);
  m.impl("set_.source_Storage", set_to_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", set_to_nothing);
  m.impl("record_stream", record_stream);
}

}  // namespace sim
