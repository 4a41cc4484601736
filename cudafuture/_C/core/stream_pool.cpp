#include "core/stream_pool.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "core/capture.h"
#include "core/device_functions.h"
#include "core/device_runtime.h"
#include "core/error.h"
#include "core/event_set.h"
#include "core/own_streams.h"
#include "core/process.h"
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

// Returns null for a device type that this process has not used yet. torch's guard for CUDA would call cuInit when it
// counts the devices, and children that are forked afterwards cannot use CUDA.
const DeviceGuardImplInterface* guard_in_use(c10::DeviceType type) noexcept {
  const DeviceGuardImplInterface* const guard = guard_of(type);
  return guard == nullptr || (type == c10::DeviceType::CUDA && !is_cuda_initialized()) ? nullptr : guard;
}

// Returns a stream of torch's pool that is not being captured, unless by `capture`.
c10::Stream stream_of_torch(c10::Device device, int priority, std::uint64_t capture) {
  constexpr int kStreams = 32;  // of torch's pool, for each priority
  const VirtualGuardImpl guard(device.type());
  for (int i = 0; i < kStreams; ++i) {
    const c10::Stream stream = guard.getNewStream(device, priority);
    const std::uint64_t of_stream = capture_of(stream);
    if (of_stream == 0 || of_stream == capture) return stream;
  }
  throw Error(ErrorKind::invalid_state,
              "every stream of " + device.str() + " is being captured: no stream is left for other work");
}

// True if all work of the stream has finished, as far as this is known.
bool is_idle(const c10::Stream& stream) {
  if (const auto ask = device_functions(stream.device_type()).is_idle) {
    return ask(stream.device_index(), stream.id());
  }
  const BesideCaptures relaxed(stream.device_type());
  try {
    return VirtualGuardImpl(stream.device_type()).queryStream(stream);
  } catch (const c10::Error&) {  // a broken device, whose next call reports the error
    return capture_of(stream) == 0;
  }
}

// The pool of one device and priority: four streams for ordinary work, and four for captures. A capture never takes a
// stream that ordinary work may be about to use.
//
// Locks: mutex_ guards lists that are not filled yet; no device call is made under it. choosing_ guards joining_, and
// only queries are made under it: a call that enqueues work may take the GIL (a simulated accelerator) or block.
class Pool {
 public:
  static Pool& of(c10::Device device, int priority);

  Pool(c10::Device device, int priority) : device_(device), priority_(priority) {}

  // Returns the next stream in turn that is idle, otherwise the next in turn. So callbacks that run at the same time
  // get different streams, and a stream that is kept busy delays few others.
  c10::Stream stream() {
    const std::size_t turn = turn_.fetch_add(1, std::memory_order_relaxed);
    const std::vector<c10::Stream>& streams = filled(streams_);
    std::optional<c10::Stream> busy;
    for (std::size_t i = 0; i < streams.size(); ++i) {
      const c10::Stream& next = streams[(turn + i) % streams.size()];
      if (capture_of(next) != 0) continue;  // the program took it from pool_stream()
      if (is_idle(next)) return next;
      if (!busy) busy = next;
    }
    return busy ? *busy : stream_of_torch(device_, priority_, 0);
  }

  // Returns the stream that is in the event's capture already, otherwise one that joins it here.
  c10::Stream captured_stream(const DeviceEvent& event) {
    const std::vector<c10::Stream>& streams = filled(captured_);
    std::optional<c10::Stream> unused;
    {
      std::lock_guard lock(choosing_);
      for (const c10::Stream& stream : streams) {
        const std::uint64_t of_stream = capture_of(stream);
        if (of_stream == event.capture()) return stream;
        const bool is_joining = std::find(joining_.begin(), joining_.end(), stream) != joining_.end();
        if (of_stream == 0 && !is_joining && !unused) unused = stream;
      }
      if (unused) joining_.push_back(*unused);
    }
    const auto joined = c10::make_scope_exit([&] {
      std::lock_guard lock(choosing_);
      joining_.erase(std::remove(joining_.begin(), joining_.end(), unused), joining_.end());
    });
    const c10::Stream stream = unused ? *unused : stream_of_torch(device_, priority_, event.capture());
    event.block(stream);
    return stream;
  }

 private:
  static constexpr std::size_t kMost = 4;

  struct Streams {
    std::vector<c10::Stream> list;
    std::atomic<bool> is_filled{false};  // the list does not change any more
  };

  // Returns the streams, which are created first.
  const std::vector<c10::Stream>& filled(Streams& streams) {
    if (streams.is_filled.load(std::memory_order_acquire)) return streams.list;
    std::unique_lock lock(mutex_);
    while (streams.list.size() < kMost) {
      lock.unlock();
      const c10::Stream created = OwnStreams::get().acquire(device_, priority_);
      lock.lock();
      if (streams.list.size() < kMost) {
        streams.list.push_back(created);
      } else {  // another thread was faster
        lock.unlock();
        OwnStreams::get().release(created, priority_);
        lock.lock();
      }
    }
    streams.is_filled.store(true, std::memory_order_release);
    return streams.list;
  }

  const c10::Device device_;
  const int priority_;
  std::mutex mutex_;
  std::mutex choosing_;
  std::vector<c10::Stream> joining_;  // streams that are about to join a capture: no other capture may take them
  Streams streams_;
  Streams captured_;
  std::atomic<std::size_t> turn_{0};
};

Pool& Pool::of(c10::Device device, int priority) {
  static std::mutex mutex;
  static auto* const pools = new std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, int>, Pool>;  // leaked
  std::lock_guard lock(mutex);
  return pools->try_emplace({device.type(), device.index(), priority}, device, priority).first->second;
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
    const DeviceGuardImplInterface* guard = guard_in_use(type);
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
    const DeviceGuardImplInterface* guard = guard_in_use(type);
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

c10::Stream pool_stream(c10::Device device, int priority, const DeviceEvent* captured) {
  refuse_after_fork();
  const c10::DeviceGuard guard(device);  // for the queries: CUDA would create a context on another device
  if (OwnStreams::can_create(device.type())) {
    Pool& pool = Pool::of(device, priority);
    return captured == nullptr ? pool.stream() : pool.captured_stream(*captured);
  }
  const c10::Stream stream = stream_of_torch(device, priority, captured == nullptr ? 0 : captured->capture());
  if (captured != nullptr) captured->block(stream);
  return stream;
}

std::vector<c10::Stream> pool_streams_after(const EventSet& events, c10::ArrayRef<c10::Device> devices, int priority) {
  std::vector<c10::Stream> streams;
  streams.reserve(devices.size());
  for (c10::Device device : devices) streams.push_back(pool_stream(device, priority, events.captured()));
  return streams;
}

std::vector<c10::Stream> pool_streams_here(c10::ArrayRef<c10::Device> devices, int priority) {
  for (c10::Device device : devices) {
    const c10::DeviceGuard guard(device);
    const c10::Stream stream = current_stream(device);
    if (!is_capturing(stream)) continue;
    return pool_streams_after(EventSet({DeviceEvent::record(stream)}), devices, priority);
  }
  return pool_streams(devices, priority);
}

std::vector<c10::Stream> pool_streams(c10::ArrayRef<c10::Device> devices, int priority) {
  return pool_streams_after(EventSet(), devices, priority);
}

CurrentDevices current_devices() {
  CurrentDevices devices;
  for (c10::DeviceType type : kTypes) {
    const DeviceGuardImplInterface* guard = guard_in_use(type);
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
