// The binding of the virtual time of host threads: a simulated accelerator sets the clock; Python code with its own
// queues joins it.
#include "core/host_clock.h"

#include "bind/future.h"

namespace cudafuture::bind {
namespace {

template <class Function>
Function function_in(nb::handle capsule) {
  return capsule.is_none() ? nullptr : reinterpret_cast<Function>(nb::cast<nb::capsule>(capsule).data());
}

// Takes capsules of the two functions. None removes the clock.
void set_clock(nb::handle now, nb::handle join) {
  set_host_clock(function_in<HostNow>(now), function_in<HostJoin>(join));
}

}  // namespace

void bind_host_clock(nb::module_& m) {
  m.def("set_host_clock", set_clock, nb::arg("now").none(), nb::arg("join").none());
  m.def("host_time", [] { return host_time().seconds; });
  m.def(
      "join_host_time",
      [](double seconds) {
        HostTime time = host_time();
        time.seconds = seconds;
        join_host_time(time);
      },
      nb::arg("seconds"));
}

}  // namespace cudafuture::bind
