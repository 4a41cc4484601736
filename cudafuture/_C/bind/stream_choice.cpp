#include "bind/stream_choice.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <string>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {

StreamChoice stream_choice_from(const Future& parent, nb::handle stream) {
  StreamChoice choice;
  static PyObject* const pool = PyUnicode_InternFromString("pool");
  if (stream.is(nb::handle(pool))) return choice;  // the usual argument
  if (nb::isinstance<nb::str>(stream)) {
    const std::string word = nb::cast<std::string>(stream);
    if (word == "pool") return choice;
    if (word != "caller") {
      const std::string message = "stream is 'pool', 'caller', a torch.Stream or several, not '" + word + "'";
      throw nb::value_error(message.c_str());
    }
    choice.pool = false;
    choice.caller = true;
    for (c10::Device device : parent.is_bounded() ? parent.bounding_set() : all_devices_with_streams()) {
      if (has_streams(device)) choice.streams.push_back(current_stream(device));
    }
    return choice;
  }
  choice.pool = false;
  choice.streams = streams_from(stream);
  for (const c10::Stream& s : choice.streams) {
    const auto& bound = parent.bounding_set();
    if (!parent.is_bounded() || std::find(bound.begin(), bound.end(), s.device()) != bound.end()) continue;
    raise_error("DeviceMismatchError", "a stream on " + s.device().str() +
                                           " was given for a callback, but the future's "
                                           "devices are " +
                                           device_set(bound));
  }
  return choice;
}

namespace {

// Returns the stream of a callback on a device for which no stream was noted when the callback was attached.
c10::Stream stream_for(c10::Device device, const EventSet& events, const StreamChoice& choice, int priority) {
  // The process had not used the device's runtime, so the caller's stream was the default one.
  if (choice.caller) return c10::impl::VirtualGuardImpl(device.type()).getDefaultStream(device);
  return pool_stream(device, priority, events.captured());
}

}  // namespace

std::vector<c10::Stream> streams_for(const Future& parent, const StreamChoice& choice, int priority) {
  std::vector<c10::Stream> streams;
  const auto has_event = [&](c10::Device device) {
    const std::vector<DeviceEventPtr>& events = parent.events().events();
    return std::any_of(events.begin(), events.end(), [&](const auto& event) { return event->device() == device; });
  };
  for (c10::Device device : parent.devices()) {
    if (!has_streams(device)) continue;
    if (!has_event(device) && !has_context(device))
      continue;  // no work to order there, and a stream would create a context
    const auto here = [&](const c10::Stream& s) { return s.device() == device; };
    const auto chosen = std::find_if(choice.streams.begin(), choice.streams.end(), here);
    streams.push_back(chosen != choice.streams.end() ? *chosen : stream_for(device, parent.events(), choice, priority));
  }
  if (choice.pool) return streams;
  for (const c10::Stream& s : choice.streams) {
    if (std::find(streams.begin(), streams.end(), s) == streams.end()) streams.push_back(s);
  }
  return streams;
}

}  // namespace cudafuture::bind
