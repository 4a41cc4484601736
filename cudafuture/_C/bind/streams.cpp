// Streams for Python: from the pool, the current ones, and a scope that makes streams current.
#include <c10/core/DeviceGuard.h>

#include <memory>
#include <type_traits>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/capture.h"
#include "core/device_functions.h"
#include "core/own_streams.h"
#include "core/pinned_memory.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

// A context manager around the core's scope.
struct UseStreams {
  explicit UseStreams(std::vector<c10::Stream> streams) : streams(std::move(streams)) {}
  UseStreams(const UseStreams&) = delete;
  UseStreams& operator=(const UseStreams&) = delete;

  std::vector<c10::Stream> streams;
  std::vector<std::unique_ptr<StreamScope>> scopes;
};

// A context manager around the core's scope.
struct PinnedScope {
  PinnedScope() = default;
  PinnedScope(const PinnedScope&) = delete;
  PinnedScope& operator=(const PinnedScope&) = delete;

  std::optional<PinnedMemoryScope> scope;
};

c10::Device device_with_streams(nb::handle device) {
  const nb::object list = nb::steal(PyList_New(0));
  if (PyList_Append(list.ptr(), device.ptr()) != 0) throw nb::python_error();
  const std::vector<c10::Device> devices = devices_from(list);
  if (devices.size() == 1 && has_streams(devices.front())) return devices.front();
  const std::string message = "no streams on " + std::string(nb::str(device).c_str()) +
                              ": name an accelerator that is present; the host has no streams";
  throw nb::value_error(message.c_str());
}

}  // namespace

void bind_streams(nb::module_& m) {
  m.def(
      "pool_stream",
      [](nb::handle device, int priority, nb::handle after) {
        const c10::Device at = device_with_streams(device);
        if (after.is_none()) return stream_object(pool_streams_here({at}, expect_priority(priority)).front());
        return stream_object(pool_streams_after(core_of(after).events(), {at}, expect_priority(priority)).front());
      },
      nb::arg("device"), nb::arg("priority"), nb::arg("after") = nb::none());
  m.def("with_index", [](nb::handle device) { return device_object(device_with_streams(device)); }, nb::arg("device"));
  m.def(
      "acquire_stream",
      [](nb::handle device, int priority) {
        const ParkingScope parking;
        return stream_object(OwnStreams::get().acquire(device_with_streams(device), expect_priority(priority)));
      },
      nb::arg("device"), nb::arg("priority"));
  m.def(
      "release_stream",
      [](nb::handle device, std::int64_t id, int priority) {
        OwnStreams::get().release(c10::Stream(c10::Stream::UNSAFE, device_from(device), id), priority);
      },
      nb::arg("device"), nb::arg("stream_id"), nb::arg("priority"));
  m.def(
      "current_streams",
      [](nb::handle devices) {
        nb::list streams;
        for (const c10::Stream& s : current_streams(devices_from(devices))) streams.append(stream_object(s));
        return streams;
      },
      nb::arg("devices"));
  nb::class_<UseStreams>(m, "UseStreams")
      .def(
          "__init__", [](UseStreams* self, nb::handle streams) { new (self) UseStreams(streams_from(streams)); },
          nb::arg("streams"))
      .def("__enter__", [](UseStreams& self) { self.scopes.push_back(std::make_unique<StreamScope>(self.streams)); })
      .def("__exit__", [](UseStreams& self, const nb::args&) {
        if (!self.scopes.empty()) self.scopes.pop_back();
      });
  nb::class_<PinnedScope>(m, "PinnedMemoryScope")
      .def(nb::init<>())
      .def("__enter__", [](PinnedScope& self) { self.scope.emplace(); })
      .def("__exit__", [](PinnedScope& self, const nb::args&) { self.scope.reset(); });
  m.def("mark_library_thread", mark_library_thread);
  m.def("relax_library_thread", [] {
    mark_library_thread();
    relax_library_thread();
  });
  // Each function is a capsule that has its name, as a simulated accelerator provides it.
  const auto set = [](nb::handle device, const nb::kwargs& functions) {
    DeviceFunctions wanted;
    std::size_t taken = 0;
    const auto take = [&](const char* name, auto& function) {
      if (!functions.contains(name)) return;
      ++taken;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          nb::cast<nb::capsule>(functions[name]).data(name));
    };
    take("make_stream", wanted.make_stream);
    take("is_idle", wanted.is_idle);
    take("capture_of", wanted.capture_of);
    take("exchange_capture_mode", wanted.exchange_capture_mode);
    take("event_time", wanted.event_time);
    take("host_now", wanted.host_now);
    take("host_join", wanted.host_join);
    if (taken != functions.size()) throw nb::type_error("set_device_functions() got a function that it does not know");
    set_device_functions(device_from(device).type(), wanted);
  };
  m.def("set_device_functions", set, nb::arg("device"), nb::arg("functions"));
  m.def("has_context", [](nb::handle device) { return has_context(device_with_streams(device)); }, nb::arg("device"));
  m.def("any_device_with_streams", any_device_with_streams);
}

}  // namespace cudafuture::bind
