#include "core/own_streams.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "core/capture.h"
#include "core/device_functions.h"
#include "core/device_runtime.h"
#include "core/process.h"

namespace cudafuture {
namespace {

using MakeStream = decltype(DeviceFunctions::make_stream);
using CreateStream = int (*)(void** stream, unsigned flags, int priority);

// Null if no runtime of CUDA or HIP can be reached, as where torch links it statically.
CreateStream create_cuda_stream() noexcept {
  static const auto create =
      find_in_device_runtime<CreateStream>("cudaStreamCreateWithPriority", "hipStreamCreateWithPriority");
  return create;
}

// Returns the id of a new stream; for a stream that c10 did not create, the id is its handle.
std::int64_t make_cuda_stream(int device, int priority) {
  constexpr unsigned kNonBlocking = 1;  // cudaStreamNonBlocking: it does not wait for the legacy default stream
  void* stream = nullptr;
  const int error = create_cuda_stream()(&stream, kNonBlocking, priority);
  TORCH_CHECK(error == 0, "a stream on cuda:", device, " could not be made: CUDA error ", error);
  return reinterpret_cast<std::int64_t>(stream);
}

MakeStream maker_for(c10::DeviceType type) noexcept {
  if (type == c10::DeviceType::CUDA) return create_cuda_stream() == nullptr ? nullptr : make_cuda_stream;
  return device_functions(type).make_stream;
}

}  // namespace

OwnStreams& OwnStreams::get() noexcept {
  static auto* const streams = new OwnStreams;
  return *streams;
}

bool OwnStreams::can_create(c10::DeviceType type) noexcept { return maker_for(type) != nullptr; }

c10::Stream OwnStreams::acquire(c10::Device device, int priority) {
  refuse_after_fork();
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(idle_.begin(), idle_.end(), [&](const Idle& idle) {
      return idle.stream.device() == device && idle.priority == priority;
    });
    if (found != idle_.end()) {
      const c10::Stream stream = found->stream;
      idle_.erase(found);
      return stream;
    }
  }
  const MakeStream make = maker_for(device.type());
  if (make == nullptr) return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, priority);
  const c10::DeviceGuard guard(device);
  const BesideCaptures relaxed(device.type());
  return c10::Stream(c10::Stream::UNSAFE, device, make(device.index(), priority));
}

void OwnStreams::release(const c10::Stream& stream, int priority) noexcept {
  if (is_forked_child() || maker_for(stream.device_type()) == nullptr) return;  // the pool keeps its own streams
  std::lock_guard lock(mutex_);
  idle_.push_back({stream, priority});
}

}  // namespace cudafuture
