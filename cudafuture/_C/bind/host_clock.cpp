// The binding of the virtual time of host threads, for Python code with its own queues.
#include "core/host_clock.h"

#include "bind/future.h"

namespace cudafuture::bind {

void bind_host_clock(nb::module_& m) {
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
