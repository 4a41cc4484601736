#include "core/event_pool.h"

#include <c10/core/DeviceGuard.h>

#include <utility>

#include "core/process.h"

namespace cudafuture {

DeviceEventPtr DeviceEvent::record(const c10::Stream& stream) {
  const c10::Device device = stream.device();
  c10::DeviceGuard guard(device);  // also while the event dies, should recording fail
  c10::Event event = EventPool::get().acquire(device);
  event.record(stream);
  return c10::make_intrusive<DeviceEvent>(std::move(event), device);
}

DeviceEvent::~DeviceEvent() { EventPool::get().give_back(std::move(event_), device_); }

bool DeviceEvent::query() const {
  c10::DeviceGuard guard(device_);
  return event_.query();
}

void DeviceEvent::synchronize() const {
  c10::DeviceGuard guard(device_);
  event_.synchronize();
}

EventPool& EventPool::get() noexcept {
  static auto* pool = new EventPool;
  return *pool;
}

c10::Event EventPool::acquire(c10::Device device) {
  {
    std::lock_guard lock(mutex_);
    auto& idle = idle_[device];
    if (!idle.empty()) {
      c10::Event event = std::move(idle.back());
      idle.pop_back();
      ++statistics_.reused;
      return event;
    }
    ++statistics_.made;
  }
  return c10::Event(device.type());
}

void EventPool::give_back(c10::Event&& event, c10::Device device) noexcept {
  if (is_forked_child()) {
    new c10::Event(std::move(event));  // leaked: the device is the parent's
    return;
  }
  {
    std::lock_guard lock(mutex_);
    auto& idle = idle_[device];
    if (idle.size() < kMaxIdlePerDevice) {
      idle.push_back(std::move(event));
      return;
    }
    ++statistics_.destroyed;
  }
  c10::DeviceGuard guard(device);
  c10::Event dying = std::move(event);
}

EventPool::Statistics EventPool::statistics() const {
  std::lock_guard lock(mutex_);
  Statistics s = statistics_;
  for (const auto& [device, idle] : idle_) s.idle += idle.size();
  return s;
}

}  // namespace cudafuture
