// The native module of cudafuture.testing.sim.
#include <c10/util/Exception.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "machine/operators/plain_state.h"
#include "sim/bind/sleep.h"
#include "sim/bind/stacks.h"
#include "sim/device/autograd.h"
#include "sim/device/current.h"
#include "sim/device/event.h"
#include "sim/device/generator.h"
#include "sim/device/guard.h"
#include "sim/device/here.h"
#include "sim/device/hooks.h"
#include "sim/device/host_clock.h"
#include "sim/device/memory.h"
#include "sim/ops/host_watch.h"
#include "sim/runtime/guard.h"
#include "sim/runtime/host_clock.h"

namespace sim {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

using NamedStream = std::tuple<int, std::int64_t>;  // device, id
StreamName named(const NamedStream& stream) { return {std::get<0>(stream), std::get<1>(stream)}; }

// The exception of device work that fails: sim.DeviceError in Python.
struct DeviceFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void install() {
  install_guard();
  install_allocators();
  install_hooks();
  install_host_clock();
  install_stacks();
  install_fault_handler();
  install_sleep();
  Accelerator::get().set_run_hook(&run_apart);
}

void start(int devices, const std::string& schedule, std::uint64_t seed, bool detect, bool poison, std::size_t memory,
           bool strict_devices, const Speeds& speeds) {
  Settings settings;
  settings.devices = devices;
  settings.schedule = schedule == "lazy"     ? WorkSchedule::lazy
                      : schedule == "jitter" ? WorkSchedule::jitter
                                             : WorkSchedule::free;
  settings.seed = seed;
  settings.detect = detect;
  settings.poison = poison;
  settings.memory = memory;
  settings.speeds = speeds;
  set_strict_devices(strict_devices);
  Accelerator::get().start(settings);
  set_current_device(0);
  for (int i = 0; i < devices; ++i) set_current_stream({i, 0});
  if (detect) {
    install_host_watch();
  } else {
    remove_host_watch();
  }
}

void sleep(const NamedStream& stream, double seconds) {
  Work work;
  work.run = [] {};
  work.site = here("sleep");
  work.cost = {WorkKind::delay, 0, seconds};
  Accelerator::get().submit(named(stream), std::move(work));
}

void fail(const NamedStream& stream, const std::string& message) {
  Work work;
  work.run = [message] { throw DeviceFailure(message); };
  work.site = here("fail");
  Accelerator::get().submit(named(stream), std::move(work));
}

// Whatever the work has thrown comes out as a DeviceFailure.
void synchronize(std::optional<int> device) {
  const nb::gil_scoped_release released;
  for (int i = 0; i < Accelerator::get().device_count(); ++i) {
    if (device.has_value() && *device != i) continue;
    try {
      Accelerator::get().synchronize(i);
    } catch (const c10::Error& error) {
      throw DeviceFailure(error.what_without_backtrace());
    }
  }
}

nb::object shown(const SitePtr& site) {
  if (site == nullptr) return nb::none();
  return nb::make_tuple(site->operation(), site->stack());
}

nb::list take_reports() {
  nb::list reports;
  for (const Report& report : Accelerator::get().take_reports()) {
    reports.append(nb::make_tuple(name_of(report.kind), report.summary, shown(report.earlier), shown(report.later)));
  }
  return reports;
}

nb::dict statistics() {
  const Statistics s = Accelerator::get().statistics();
  nb::dict d;
  d["submitted"] = s.submitted;
  d["executed"] = s.executed;
  d["dropped"] = s.dropped;
  d["recorded"] = s.recorded;
  d["waited"] = s.waited;
  d["allocated_bytes"] = s.allocated_bytes;
  d["reserved_bytes"] = s.reserved_bytes;
  d["deferred_blocks"] = s.deferred_blocks;
  return d;
}

void bind_streams(nb::module_& m) {
  m.def("device_count", [] { return Accelerator::get().device_count(); });
  m.def("current_device", [] { return current_device(); });
  m.def("current_stream", [](int device) {
    const StreamName stream = current_stream(device < 0 ? current_device() : device);
    return NamedStream(stream.device, stream.id);
  });
  m.def("synchronize", synchronize, "device"_a.none());
  m.def("sleep", sleep);
  m.def("fail", fail);
  m.def("begin_capture", [](const NamedStream& stream, int mode) {
    Accelerator::get().begin_capture(named(stream), static_cast<CaptureMode>(mode));
  });
  m.def("end_capture", [](const NamedStream& stream) { Accelerator::get().end_capture(named(stream)); });
  m.def("has_context", [](int device) { return Accelerator::get().has_context(device); });
  m.def("priority", [](const NamedStream& stream) { return Accelerator::get().priority_of(named(stream)); });
  m.def("hold", [](const NamedStream& stream) {
    auto* const gate = new GatePtr(Accelerator::get().hold(named(stream)));
    return nb::capsule(gate, [](void* p) noexcept { delete static_cast<GatePtr*>(p); });
  });
  m.def("open", [](const nb::capsule& gate) {
    const GatePtr opened = *static_cast<GatePtr*>(gate.data());
    const nb::gil_scoped_release released;
    Accelerator::get().open(opened);
  });
}

// The functions that cudafuture's core asks of a type of devices, each in a capsule with its name.
nb::dict device_functions() {
  std::int64_t (*const make_stream)(int, int) = [](int device, int priority) {
    return Accelerator::get().own_stream(device, priority).id;
  };
  bool (*const is_idle)(int, std::int64_t) = [](int device, std::int64_t id) {
    return Accelerator::get().is_idle({device, id});
  };
  std::uint64_t (*const capture_of)(int, std::int64_t) = [](int device, std::int64_t id) {
    return Accelerator::get().capture_of({device, id});
  };
  int (*const exchange_capture_mode)(int*) = [](int* mode) {
    *mode = static_cast<int>(std::exchange(capture_mode, static_cast<CaptureMode>(*mode)));
    return 0;
  };
  double (*const event_time)(void*) = [](void* event) {
    return Accelerator::get().time_of(static_cast<const Event*>(event)->recording);
  };
  double (*const host_now)() noexcept = []() noexcept { return HostClock::current().now(); };
  void (*const host_join)(double) noexcept = [](double seconds) noexcept { HostClock::current().join(seconds); };
  nb::dict functions;
  const auto add = [&](const char* name, auto function) {
    functions[name] = nb::capsule(reinterpret_cast<void*>(function), name);
  };
  add("make_stream", make_stream);
  add("is_idle", is_idle);
  add("capture_of", capture_of);
  add("exchange_capture_mode", exchange_capture_mode);
  add("event_time", event_time);
  add("host_now", host_now);
  add("host_join", host_join);
  return functions;
}

void bind_generators(nb::module_& m) {
  m.def("generator", [](int device) {
    const at::Generator& generator = default_generator(device);
    return std::tuple(generator.current_seed(), generator.get_offset());
  });
  m.def("set_generator", [](int device, std::uint64_t seed, std::uint64_t drawn) {
    at::Generator generator = default_generator(device);
    generator.set_current_seed(seed);
    generator.set_offset(drawn);
  });
}

void bind_time(nb::module_& m) {
  nb::class_<Speeds>(m, "Speeds").def("__init__", [](Speeds* s, double compute, double copy, double launch) {
    new (s) Speeds{compute, copy, launch};
  });
  m.def("device_functions", device_functions);
  m.def("now", [] { return Accelerator::get().now(); });
  m.def("spend", [](double seconds) { Accelerator::get().spend(seconds); });
  m.def(
      "set_speeds",
      [](const Speeds& speeds, std::optional<NamedStream> stream) {
        Accelerator::get().set_speeds(stream.has_value() ? std::optional(named(*stream)) : std::nullopt, speeds);
      },
      "speeds"_a, "stream"_a.none());
}

}  // namespace

}  // namespace sim

NB_MODULE(_C, m) {
  using namespace sim;
  nb::set_leak_warnings(false);
  nb::exception<DeviceFailure>(m, "DeviceError", PyExc_RuntimeError).attr("__doc__") =
      "Device work has failed, and broken its device: `sim.clear_error()` repairs it. torch's own calls raise a "
      "RuntimeError instead.";
  install();
  m.attr("MAX_DEVICES") = kMaxDevices;
  m.def("start", start);
  m.def("stop", [] {
    Accelerator::get().stop();
    remove_host_watch();
  });
  m.def("take_reports", take_reports);
  m.def("report_count", [] { return Accelerator::get().report_count(); });
  m.def("clear_error", [](int device) { Accelerator::get().clear_error(device); });
  m.def("statistics", statistics);
  m.def("settle_autograd", settle_autograd, nb::call_guard<nb::gil_scoped_release>());
  m.def("empty_cache", [] { Accelerator::get().empty_cache(); });
  bind_streams(m);
  bind_generators(m);
  bind_time(m);
}
