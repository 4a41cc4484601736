// The events of a future, as a read-only mapping.
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>

#include "bind/errors.h"
#include "bind/future.h"
#include "bind/method_descriptors.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

struct EventView {
  DeviceEventPtr event;
};

void wait_on_stream(const EventView& view, nb::handle stream) {
  const c10::Device device = view.event->device();
  if (!stands(SyncEdge::event_wait)) return;
  const std::vector<c10::Stream> streams = stream.is_none() ? current_streams({device}) : streams_from(stream);
  for (const c10::Stream& s : streams) {
    if (s.device().type() == device.type()) continue;
    raise_error("DeviceMismatchError",
                "a stream on " + s.device().str() + " cannot wait for an event of " + device.str());
  }
  const WithoutGil released;  // a device whose queue is full blocks the call
  for (const c10::Stream& s : streams) view.event->block(s);
}

// Returns one of torch's events that completes with this one: it is recorded on a pool stream that waits for this
// event.
nb::object to_torch_event(const EventView& view) {
  static Imported event_class{"torch", "Event"};
  const c10::Device device = view.event->device();
  const c10::OptionalDeviceGuard guard(stands(SyncEdge::guard_to_torch) ? std::optional(device) : std::nullopt);
  const c10::Stream stream = pool_stream(device, 0, view.event->is_captured() ? view.event.get() : nullptr);
  if (stands(SyncEdge::event_to_torch_wait)) view.event->block(stream);
  nb::object event = event_class()(device_object(device));
  if (stands(SyncEdge::event_to_torch_record)) event.attr("record")(stream_object(stream));
  return event;
}

}  // namespace

nb::object events_of(const Future& future) {
  nb::dict views;
  if (!future.done()) return nb::steal(PyDictProxy_New(views.ptr()));
  for (const DeviceEventPtr& event : future.events().events()) {
    views[device_object(event->device())] = nb::cast(EventView{event});
  }
  return nb::steal(PyDictProxy_New(views.ptr()));
}

void bind_events(nb::module_& m) {
  auto c = nb::class_<EventView>(m, "EventView", "The device event of a future on one device; read-only.");
  c.def_prop_ro(
       "device", [](const EventView& v) { return device_object(v.event->device()); },
       "Device on which the event was recorded.")
      .def(
          "query", [](const EventView& v) { return v.event->query(); },
          "Return True if the device has reached the event. Raises the error that the device reports instead.")
      .def(
          "synchronize",
          [](const EventView& v) {
            refuse_while_capturing(v.event->device());
            const WithoutGil released;
            if (stands(SyncEdge::event_synchronize)) v.event->synchronize();
          },
          "Block the calling thread until the device has reached the event.")
      .def("wait", wait_on_stream, nb::arg("stream") = nb::none(),
           "Make `stream` (default: the device's current one) wait for the event; the host goes on.")
      .def("to_torch_event", to_torch_event, "Return a new torch.Event that is reached when this event is.")
      .def_prop_ro(
          "capture", [](const EventView& v) { return v.event->capture(); },
          "Number of the stream capture in which the event was recorded; 0: none.")
      .def("__repr__", [](const EventView& v) {
        const char* state = v.event->is_captured() ? "captured" : v.event->query() ? "reached" : "pending";
        return "<EventView of " + v.event->device().str() + ": " + state + ">";
      });
  use_method_descriptors(c);
}

}  // namespace cudafuture::bind
