// The storage that a tensor occupies on its device.
//
// A copy of a tensor can cost more than the storage: where Python knows the tensor, reference counting enters the
// interpreter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <utility>

namespace cudafuture {

struct DeviceMemory {
  DeviceMemory(const at::Tensor& tensor)  // NOLINT(google-explicit-constructor): accepts a tensor
      : device(tensor.device()), storage(tensor.has_storage() ? tensor.storage() : c10::Storage()) {}
  DeviceMemory(c10::Device device, c10::Storage storage) : device(device), storage(std::move(storage)) {}

  c10::Device device;
  c10::Storage storage;  // none: unknown to the allocator
};

}  // namespace cudafuture
