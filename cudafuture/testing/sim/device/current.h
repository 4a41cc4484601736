// The current device of a thread, and its current stream of each device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "sim/runtime/accelerator.h"

namespace sim {

int current_device() noexcept;
void set_current_device(int device) noexcept;  // not checked

StreamName current_stream(int device) noexcept;
void set_current_stream(StreamName stream) noexcept;

inline c10::Device torch_device(int device) noexcept {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)};
}
inline c10::Stream torch_stream(StreamName stream) noexcept {
  return c10::Stream(c10::Stream::UNSAFE, torch_device(stream.device), stream.id);
}
inline StreamName stream_name(const c10::Stream& stream) noexcept {
  return {static_cast<int>(stream.device_index()), stream.id()};
}

}  // namespace sim
