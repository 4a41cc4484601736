// Tensors of a simulated device, made and resized.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <optional>

#include "sim/device/current.h"

namespace sim {

// A device is current for as long as this lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device) noexcept : before_(current_device()) { set_current_device(device); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() { set_current_device(before_); }

 private:
  const int before_;
};

// The index of a device that was asked for; of the current one when there is none.
int device_index(std::optional<c10::Device> device);

// Return true if the tensor lies in pinned memory of the host.
bool is_pinned(const at::Tensor& tensor);

at::Tensor new_tensor(int device, c10::IntArrayRef sizes, c10::ScalarType dtype,
                      std::optional<c10::MemoryFormat> format = std::nullopt);
at::Tensor new_tensor(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType dtype);

// Gives the tensor this size, and more memory if it needs it.
void resize_tensor(const at::Tensor& tensor, c10::IntArrayRef sizes, std::optional<c10::IntArrayRef> strides);

}  // namespace sim
