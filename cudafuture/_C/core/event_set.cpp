#include "core/event_set.h"

#include <algorithm>

#include "core/stream_pool.h"
#include "core/sync_edge.h"

namespace cudafuture {

namespace {

DeviceEventPtr record_on(c10::Device device, c10::ArrayRef<c10::Stream> streams) {
  const auto given =
      std::find_if(streams.begin(), streams.end(), [&](const c10::Stream& s) { return s.device() == device; });
  return DeviceEvent::record(given != streams.end() ? *given : current_stream(device));
}

}  // namespace

EventSet EventSet::record(c10::ArrayRef<c10::Device> devices, c10::ArrayRef<c10::Stream> streams) {
  EventSet set;
  set.events_.reserve(devices.size());
  for (c10::Device device : devices) set.events_.push_back(record_on(device, streams));
  return set;
}

EventSet EventSet::record_possible(c10::ArrayRef<c10::Device> devices, c10::ArrayRef<c10::Stream> streams,
                                   std::exception_ptr& error) noexcept {
  EventSet set;
  for (c10::Device device : devices) {
    try {
      set.events_.push_back(record_on(device, streams));
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  return set;
}

EventSet EventSet::join(c10::ArrayRef<const EventSet*> parts, int priority) {
  EventSet joined;
  std::vector<std::vector<DeviceEventPtr>> by_device;
  for (const EventSet* part : parts) {
    for (const DeviceEventPtr& event : part->events_) {
      const auto same = [&](const auto& list) { return list.front()->device() == event->device(); };
      auto list = std::find_if(by_device.begin(), by_device.end(), same);
      if (list == by_device.end()) {
        by_device.push_back({event});
      } else {
        list->push_back(event);
      }
    }
  }
  for (const auto& list : by_device) {
    if (list.size() == 1) {
      joined.events_.push_back(list.front());
      continue;
    }
    const c10::Stream stream = pool_stream(list.front()->device(), priority, EventSet(list).captured());
    if (stands(SyncEdge::join_wait)) {
      for (const DeviceEventPtr& event : list) event->block(stream);
    }
    if (stands(SyncEdge::join_record)) joined.events_.push_back(DeviceEvent::record(stream));
  }
  return joined;
}

const DeviceEvent* EventSet::captured() const noexcept {
  for (const DeviceEventPtr& event : events_) {
    if (event->is_captured()) return event.get();
  }
  return nullptr;
}

std::vector<c10::Device> EventSet::devices() const {
  std::vector<c10::Device> devices;
  devices.reserve(events_.size());
  for (const DeviceEventPtr& event : events_) devices.push_back(event->device());
  return devices;
}

void EventSet::block(const c10::Stream& stream) const {
  for (const DeviceEventPtr& event : events_) {
    if (event->device() == stream.device()) event->block(stream);
  }
}

void EventSet::block_current_streams() const {
  for (const DeviceEventPtr& event : events_) event->block(current_stream(event->device()));
}

bool EventSet::query() const {
  return std::all_of(events_.begin(), events_.end(), [](const DeviceEventPtr& event) { return event->query(); });
}

}  // namespace cudafuture
