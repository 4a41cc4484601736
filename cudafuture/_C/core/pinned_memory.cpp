#include "core/pinned_memory.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "core/stream_pool.h"

namespace cudafuture {
namespace {

// Returns a device that this process uses: a current one, if possible.
std::optional<c10::Device> device_in_use() {
  for (const c10::Device device : current_devices()) {
    if (has_context(device)) return device;
  }
  const std::vector<c10::Device> devices = all_devices_with_streams();
  const auto used = std::find_if(devices.begin(), devices.end(), has_context);
  return used == devices.end() ? std::nullopt : std::optional(*used);
}

}  // namespace

PinnedMemoryScope::PinnedMemoryScope() {
  const std::optional<c10::Device> device = device_in_use();
  if (!device) return;
  guard_.emplace(*device);
  relaxed_.emplace(device->type());
}

void relax_library_thread() {
  if (!may_end_captures()) return;
  const std::optional<c10::Device> device = device_in_use();
  if (!device) return;
  const c10::DeviceGuard guard(*device);
  relax_captures(device->type());
}

at::Tensor empty_pinned(std::size_t nbytes) {
  const PinnedMemoryScope scope;
  const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true);
  return at::empty({static_cast<std::int64_t>(nbytes)}, options);
}

}  // namespace cudafuture
