// Functions of the devices of one type that c10's guard interface lacks.
//
// The core finds CUDA's in its runtime (device_runtime.h). A simulated accelerator sets its own, all of them at once.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "core/host_clock.h"

namespace cudafuture {

// Null: the devices lack that function.
struct DeviceFunctions {
  // Creates a stream of the priority on the device with that index, and returns its id for c10; throws on failure.
  std::int64_t (*make_stream)(int device, int priority) = nullptr;

  // Returns true if all work of a stream has finished, and orders nothing. Without this function, the core calls
  // queryStream() of torch's guard. That would order the host after the stream's work, and so hide races of the
  // program.
  bool (*is_idle)(int device, std::int64_t stream_id) = nullptr;

  // Returns a number that identifies the capture of a stream among all of the process; 0 if there is none.
  std::uint64_t (*capture_of)(int device, std::int64_t stream_id) = nullptr;

  // Exchanges the calling thread's capture mode, as cudaThreadExchangeStreamCaptureMode does: `*mode` is the new mode,
  // and receives the old one. Returns 0 on success.
  int (*exchange_capture_mode)(int* mode) = nullptr;

  // Returns the virtual time, in seconds, at which an event is reached, known when it is recorded. The call orders
  // nothing, and lets no work run. `event`: as c10::Event::eventId() returns it.
  double (*event_time)(void* event) = nullptr;

  // The virtual time of host threads; see host_clock.h.
  HostNow host_now = nullptr;
  HostJoin host_join = nullptr;

  friend bool operator==(const DeviceFunctions&, const DeviceFunctions&) = default;
};

// Sets the functions of a device type. They must stay callable: another thread may call those that were set before.
// Virtual times that were read before have no effect from then on. There is one clock: the type that was set last has
// it.
void set_device_functions(c10::DeviceType type, const DeviceFunctions& functions);

const DeviceFunctions& device_functions(c10::DeviceType type) noexcept;

}  // namespace cudafuture
