// What a tensor occupies on its device. Copies of a tensor can cost more than that: where Python knows it, the counting
// of references asks the interpreter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <utility>

namespace cudafuture {

struct DeviceMemory {
  DeviceMemory(const at::Tensor& tensor)  // NOLINT(google-explicit-constructor): a tensor will do
      : device(tensor.device()), storage(tensor.has_storage() ? tensor.storage() : c10::Storage()) {}
  DeviceMemory(c10::Device device, c10::Storage storage) : device(device), storage(std::move(storage)) {}

  c10::Device device;
  c10::Storage storage;  // none: the allocator knows nothing of it
};

}  // namespace cudafuture
