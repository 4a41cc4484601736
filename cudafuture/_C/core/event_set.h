// The device events of one future: at most one per device.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "core/event_pool.h"
#include "core/sync_edge.h"

namespace cudafuture {

class EventSet {
 public:
  // Records one event per device: on the stream of `streams` on that device, otherwise on the device's current stream.
  static EventSet record(c10::ArrayRef<c10::Device> devices, c10::ArrayRef<c10::Stream> streams = {});

  // Does the same for work that has failed. Devices that cannot record are left out, and `error` becomes the first of
  // their errors. A consumer that recovers is ordered after the work on the other devices.
  static EventSet record_possible(c10::ArrayRef<c10::Device> devices, c10::ArrayRef<c10::Stream> streams,
                                  std::exception_ptr& error) noexcept;

  // Returns a set that is ordered after all of `parts`. Where several parts have an event on a device, they are joined
  // on one pool stream of that priority, and one event is recorded there.
  static EventSet join(c10::ArrayRef<const EventSet*> parts, int priority);

  EventSet() = default;
  explicit EventSet(std::vector<DeviceEventPtr> events) noexcept : events_(std::move(events)) {}

  bool empty() const noexcept { return events_.empty(); }
  // While a capture holds an event of the set, the host can neither query the events nor wait for them.
  bool is_captured() const noexcept { return captured() != nullptr; }
  const DeviceEvent* captured() const noexcept;  // the first event of a capture; null: none
  const std::vector<DeviceEventPtr>& events() const noexcept { return events_; }
  std::vector<c10::Device> devices() const;

  void block(const c10::Stream& stream) const;  // makes the stream wait for its own device's event
  void block_current_streams() const;
  bool query() const;  // true once all the device work has finished; throws a device's error

 private:
  std::vector<DeviceEventPtr> events_;
};

// Returns a copy for a future that completes together with another: it is ordered after the same device work.
inline EventSet kept(const EventSet& events, SyncEdge edge) { return stands(edge) ? events : EventSet(); }

}  // namespace cudafuture
