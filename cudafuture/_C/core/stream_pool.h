// Streams: from the device's pool by priority, those that are current, and making some current for a while.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <vector>

namespace cudafuture {

// True for devices that are there and whose work is asynchronous, ordered by streams and events. A bounding set may
// name devices that are not there: no value can live on them.
bool has_streams(c10::Device device) noexcept;

// True when such a device can exist in this process at all. Cheap.
bool any_device_with_streams() noexcept;
std::vector<c10::Device> all_devices_with_streams();

// True where this process has a context. A device without one has no pending work, and using it would create the
// context: on CUDA about half a gigabyte of the device's memory.
bool has_context(c10::Device device);

// The devices of `tensors` that have streams, without duplicates.
std::vector<c10::Device> devices_of(c10::ArrayRef<at::Tensor> tensors);

// A stream of the device's own pool. Lower is more urgent: 0 is the default, -1 high. The pool hands its streams out
// round-robin, so two callers can share one: never hold one for good.
c10::Stream pool_stream(c10::Device device, int priority);
std::vector<c10::Stream> pool_streams(c10::ArrayRef<c10::Device> devices, int priority);

// The calling thread's current device of each type that has streams: nearly always there is one such type.
using CurrentDevices = c10::SmallVector<c10::Device, 2>;
CurrentDevices current_devices();

c10::Stream current_stream(c10::Device device);
std::vector<c10::Stream> current_streams(c10::ArrayRef<c10::Device> devices);

// Throws when the current stream of the device records a graph: a host that waits there would break the capture.
void refuse_while_capturing(c10::Device device);

// Makes streams current for a scope; afterwards each device of their types has its stream, and the thread its devices,
// back, whatever was changed in between.
class StreamScope {
 public:
  explicit StreamScope(c10::ArrayRef<c10::Stream> streams);
  ~StreamScope();
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  void note(c10::DeviceType type);
  void leave() noexcept;

  std::vector<c10::Stream> before_;
  std::vector<c10::Device> devices_before_;
};

}  // namespace cudafuture
