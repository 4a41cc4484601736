// Streams: from the library's pool by priority, the current ones, and a scope that makes streams current.
//
// The pool has four streams for each device and priority, which the library creates itself (own_streams): the caching
// allocator and cuBLAS keep memory for each stream that they have seen. Work that is captured into a graph has four
// others. The pool does not use torch's, whose streams torch.cuda.graph() captures and the program keeps busy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace cudafuture {

class DeviceEvent;
class EventSet;

// True for devices that exist and whose work is asynchronous, ordered by streams and events. A bounding set may name
// devices that do not exist: no value can live on them.
bool has_streams(c10::Device device) noexcept;

// True if this process may have work on such a device: it has initialized the runtime of one. Cheap.
bool any_device_with_streams() noexcept;
// Those devices; none before their runtime is initialized.
std::vector<c10::Device> all_devices_with_streams();

// True if this process has a context on the device. A device without one has no pending work, and using it would create
// the context: on CUDA about half a gigabyte of device memory.
bool has_context(c10::Device device);

// The devices of `tensors` that have streams, without duplicates.
std::vector<c10::Device> devices_of(c10::ArrayRef<at::Tensor> tensors);

// Returns a stream of the pool. Lower is more urgent: 0 is the default, -1 high. Callers share the streams: do not keep
// one permanently. So at most four pieces of work at a time are independent of each other.
//
// `captured`: an event of a stream capture, or null. The returned stream waits for it, and so has joined the capture:
// no other capture gets the stream. Throws the device's error if a new stream cannot be created.
c10::Stream pool_stream(c10::Device device, int priority, const DeviceEvent* captured = nullptr);
// Return streams for work that follows `events`, or the work on this thread's current streams: in the same capture.
std::vector<c10::Stream> pool_streams_after(const EventSet& events, c10::ArrayRef<c10::Device> devices, int priority);
std::vector<c10::Stream> pool_streams_here(c10::ArrayRef<c10::Device> devices, int priority);
std::vector<c10::Stream> pool_streams(c10::ArrayRef<c10::Device> devices, int priority);

// The calling thread's current device of each type that has streams: nearly always there is one such type.
using CurrentDevices = c10::SmallVector<c10::Device, 2>;
CurrentDevices current_devices();

c10::Stream current_stream(c10::Device device);
std::vector<c10::Stream> current_streams(c10::ArrayRef<c10::Device> devices);

// Throws if the current stream of the device is being captured: a host that waits there would break the capture.
void refuse_while_capturing(c10::Device device);

// Makes streams current for a scope. Afterwards each device of their types has its old stream again, and the thread its
// old devices, whatever changed in between.
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
