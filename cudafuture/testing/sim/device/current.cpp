#include "sim/device/current.h"

#include <array>

namespace sim {
namespace {

thread_local int device_now = 0;
thread_local std::array<std::int64_t, kMaxDevices> streams_now{};  // by device; 0: the default stream

}  // namespace

int current_device() noexcept { return device_now; }
void set_current_device(int device) noexcept { device_now = device; }

StreamName current_stream(int device) noexcept { return {device, streams_now[static_cast<std::size_t>(device)]}; }
void set_current_stream(StreamName stream) noexcept {
  streams_now[static_cast<std::size_t>(stream.device)] = stream.id;
}

}  // namespace sim
