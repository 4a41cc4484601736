#include "core/stream_pool.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "core/capture.h"
#include "core/error.h"
#include "core/sync_edge.h"

namespace cudafuture {
namespace {

using c10::impl::DeviceGuardImplInterface;
using c10::impl::VirtualGuardImpl;

// Device types whose guards have streams and events in torch.
constexpr c10::DeviceType kTypes[] = {c10::DeviceType::CUDA,        c10::DeviceType::XPU, c10::DeviceType::HIP,
                                      c10::DeviceType::PrivateUse1, c10::DeviceType::HPU, c10::DeviceType::MTIA};

const DeviceGuardImplInterface* guard_of(c10::DeviceType type) noexcept {
  return c10::impl::device_guard_impl_registry[static_cast<std::size_t>(type)].load(std::memory_order_acquire);
}

}  // namespace

bool has_streams(c10::Device device) noexcept {
  if (std::find(std::begin(kTypes), std::end(kTypes), device.type()) == std::end(kTypes)) return false;
  const DeviceGuardImplInterface* guard = guard_of(device.type());
  return guard != nullptr && device.index() < guard->deviceCount();
}

bool any_device_with_streams() noexcept {
  static std::atomic<bool> seen{false};
  if (seen.load(std::memory_order_relaxed)) return true;
  for (c10::DeviceType type : kTypes) {
    const DeviceGuardImplInterface* guard = guard_of(type);
    if (guard != nullptr && guard->deviceCount() > 0) {
      seen = true;
      return true;
    }
  }
  return false;
}

std::vector<c10::Device> all_devices_with_streams() {
  std::vector<c10::Device> devices;
  for (c10::DeviceType type : kTypes) {
    const DeviceGuardImplInterface* guard = guard_of(type);
    const c10::DeviceIndex count = guard == nullptr ? 0 : guard->deviceCount();
    for (c10::DeviceIndex i = 0; i < count; ++i) devices.emplace_back(type, i);
  }
  return devices;
}

bool has_context(c10::Device device) {
  try {
    return at::globalContext().getAcceleratorHooksInterface(device.type()).hasPrimaryContext(device.index());
  } catch (const c10::Error&) {  // this device type does not say
    return true;
  }
}

std::vector<c10::Device> devices_of(c10::ArrayRef<at::Tensor> tensors) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& tensor : tensors) {
    const c10::Device device = tensor.device();
    if (has_streams(device) && std::find(devices.begin(), devices.end(), device) == devices.end()) {
      devices.push_back(device);
    }
  }
  return devices;
}

c10::Stream pool_stream(c10::Device device, int priority) {
  return VirtualGuardImpl(device.type()).getNewStream(device, priority);
}

std::vector<c10::Stream> pool_streams(c10::ArrayRef<c10::Device> devices, int priority) {
  std::vector<c10::Stream> streams;
  streams.reserve(devices.size());
  for (c10::Device device : devices) streams.push_back(pool_stream(device, priority));
  return streams;
}

CurrentDevices current_devices() {
  CurrentDevices devices;
  for (c10::DeviceType type : kTypes) {
    const DeviceGuardImplInterface* guard = guard_of(type);
    if (guard != nullptr && guard->deviceCount() > 0) devices.push_back(guard->getDevice());
  }
  return devices;
}

c10::Stream current_stream(c10::Device device) { return VirtualGuardImpl(device.type()).getStream(device); }

std::vector<c10::Stream> current_streams(c10::ArrayRef<c10::Device> devices) {
  std::vector<c10::Stream> streams;
  streams.reserve(devices.size());
  for (c10::Device device : devices) streams.push_back(current_stream(device));
  return streams;
}

void refuse_while_capturing(c10::Device device) {
  c10::DeviceGuard guard(device);
  if (!is_capturing(current_stream(device))) return;
  throw Error(ErrorKind::invalid_state,
              "a blocking wait() inside the stream capture of " + device.str() +
                  " would break the graph; use wait(non_blocking=True), which only orders the streams");
}

StreamScope::StreamScope(c10::ArrayRef<c10::Stream> streams) {
  if (!stands(SyncEdge::scope_enter)) return;
  for (const c10::Stream& stream : streams) note(stream.device_type());
  try {
    for (const c10::Stream& stream : streams) VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
  } catch (...) {
    leave();
    throw;
  }
}

StreamScope::~StreamScope() { leave(); }

// Saves the current streams and the device of one device type, once.
void StreamScope::note(c10::DeviceType type) {
  const auto same_type = [&](c10::Device d) { return d.type() == type; };
  if (std::any_of(devices_before_.begin(), devices_before_.end(), same_type)) return;
  const VirtualGuardImpl guard(type);
  devices_before_.push_back(guard.getDevice());
  const c10::DeviceIndex count = guard.deviceCount();
  before_.reserve(before_.size() + static_cast<std::size_t>(count));
  for (c10::DeviceIndex i = 0; i < count; ++i) before_.push_back(guard.getStream(c10::Device(type, i)));
}

void StreamScope::leave() noexcept {
  if (stands(SyncEdge::scope_leave)) {
    for (const c10::Stream& stream : before_) VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
  }
  if (!stands(SyncEdge::scope_device)) return;
  for (c10::Device device : devices_before_) VirtualGuardImpl(device.type()).uncheckedSetDevice(device);
}

}  // namespace cudafuture
