#include "core/event_pool.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <limits>
#include <utility>

#include "core/capture.h"
#include "core/device_functions.h"
#include "core/error.h"
#include "core/process.h"
#include "core/sync_edge.h"
#include "core/trace.h"

namespace cudafuture {
namespace {

// A scope in which the device is current. Usually it is current already, and the scope costs one call of the guard.
class Current {
 public:
  Current(c10::Device device, SyncEdge edge) : impl_(c10::impl::getDeviceGuardImpl(device.type())), before_(device) {
    if (!stands(edge)) return;
    before_ = impl_->getDevice();
    is_changed_ = before_ != device;
    if (is_changed_) impl_->exchangeDevice(device);
  }
  ~Current() {
    if (is_changed_) impl_->uncheckedSetDevice(before_);  // creates no context
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const c10::impl::DeviceGuardImplInterface* impl_;
  c10::Device before_;
  bool is_changed_ = false;
};

}  // namespace

DeviceEventPtr DeviceEvent::record(const c10::Stream& stream) {
  const c10::Device device = stream.device();
  const Current guard(device, SyncEdge::guard_record);  // also for the event's destruction, if recording fails
  const bool is_timed = is_traced() && device_functions(device.type()).event_time == nullptr;
  c10::Event event =
      EventPool::get().acquire(device, is_timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT);
  const std::int64_t recorded_at = is_timed ? monotonic_nanoseconds() : 0;
  event.record(stream);
  return c10::make_intrusive<DeviceEvent>(std::move(event), stream, capture_of(stream), recorded_at);
}

double DeviceEvent::seconds_since(const DeviceEvent& earlier) const {
  const Current guard(device_, SyncEdge::guard_query);
  const BesideCaptures relaxed(device_.type());
  return earlier.event_.elapsedTime(event_) / 1e3;
}

std::optional<double> DeviceEvent::virtual_time() const {
  const auto time = device_functions(device_.type()).event_time;
  if (time == nullptr || !has_host_clock()) return std::nullopt;
  return time(event_.eventId());
}

DeviceEvent::~DeviceEvent() { EventPool::get().release(std::move(event_), device_); }

void DeviceEvent::refuse_captured() const {
  if (!is_captured()) return;
  throw Error(
      ErrorKind::invalid_state,
      "the event on " + device_.str() +
          " was recorded inside a stream capture: the host cannot query it or wait for it, since that would end "
          "the capture. Use wait(non_blocking=True), which only orders streams, and synchronize after the "
          "graph's replay");
}

// torch's guards select the stream's device for the call and restore the thread's own device afterwards. If the thread
// never selected one, that is device 0, and from CUDA 12 on selecting it creates a context there (pytorch#94864).
void DeviceEvent::block(const c10::Stream& stream) const {
  const Current guard(stream.device(), SyncEdge::guard_block);
  event_.block(stream);
}

bool DeviceEvent::query() const {
  refuse_captured();
  const Current guard(device_, SyncEdge::guard_query);
  const BesideCaptures relaxed(device_.type());
  return event_.query();
}

void DeviceEvent::synchronize() const {
  refuse_captured();
  const Current guard(device_, SyncEdge::guard_synchronize);
  const BesideCaptures relaxed(device_.type());
  event_.synchronize();
}

EventPool& EventPool::get() noexcept {
  static auto* pool = new EventPool;
  return *pool;
}

c10::Event EventPool::acquire(c10::Device device, c10::EventFlag flag) {
  {
    std::lock_guard lock(mutex_);
    auto& idle = idle_[device].with(flag);
    if (!idle.empty()) {
      c10::Event event = std::move(idle.back());
      idle.pop_back();
      ++statistics_.reused;
      return event;
    }
    ++statistics_.made;
  }
  return c10::Event(device.type(), flag);
}

void EventPool::release(c10::Event&& event, c10::Device device) noexcept {
  if (is_forked_child()) {
    new c10::Event(std::move(event));  // leaked: the device is the parent's
    return;
  }
  if (keep(std::move(event), device, kMaxIdlePerDevice)) return;
  try {
    const Current guard(device, SyncEdge::guard_destroy);
    c10::Event dying = std::move(event);
  } catch (...) {  // the device is broken, or does not exist any more
    keep(std::move(event), device, std::numeric_limits<std::size_t>::max());
    return;
  }
  std::lock_guard lock(mutex_);
  ++statistics_.destroyed;
}

bool EventPool::keep(c10::Event&& event, c10::Device device, std::size_t most) noexcept {
  std::lock_guard lock(mutex_);
  auto& idle = idle_[device].with(event.flag());
  if (idle.size() >= most) return false;
  idle.push_back(std::move(event));
  return true;
}

EventPool::Statistics EventPool::statistics() const {
  std::lock_guard lock(mutex_);
  Statistics s = statistics_;
  for (const auto& [device, idle] : idle_) s.idle += idle.plain.size() + idle.timed.size();
  return s;
}

}  // namespace cudafuture
