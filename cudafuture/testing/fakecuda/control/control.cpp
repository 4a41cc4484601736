#include "fakecuda/control/control.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fakecuda/cudart/call.h"

using namespace fakecuda;

namespace {

// The kernel module of NVIDIA's driver makes this file.
constexpr const char* kRealDriver = "/proc/driver/nvidia/version";

// A program that believes it computes on a GPU, and does not, does harm. So nothing runs beside a real driver.
__attribute__((constructor)) void refuse_beside_a_real_driver() {
  if (access(kRealDriver, F_OK) != 0) return;
  fprintf(stderr, "fakecuda: %s exists, so this machine has a CUDA driver; run on the real devices instead\n",
          kRealDriver);
  _exit(3);
}

// The text that testing/fakecuda/_races.py reads. Fields end with ASCII's record separator, parts of a field with its
// unit separator, reports with its group separator.
void append_site(std::string& text, const char* key, const machine::SitePtr& site) {
  if (site == nullptr) return;
  text += std::string(key) + "\x1f" + site->operation() + "\x1f" + site->stack() + "\x1e";
}

std::string text_of(machine::Report&& report) {
  std::string text = std::string(machine::name_of(report.kind)) + "\x1e" + report.summary + "\x1e";
  append_site(text, "earlier", report.earlier);
  append_site(text, "later", report.later);
  return text + "\x1d";
}

}  // namespace

extern "C" {

// ---- streams
void* fakecuda_hold(void* handle, int device) {
  CudaCall call(__func__);
  CudaStream* const stream = call.machine.find_stream(handle, device);
  return stream == nullptr ? nullptr : new GatePtr(call.machine.hold(call.lock, *stream));
}

void fakecuda_open(void* handle) {
  auto* const gate = static_cast<GatePtr*>(handle);
  {
    const CudaCall call(__func__);
    call.machine.open(**gate);
  }
  delete gate;
}

// ---- failures
void fakecuda_fail(void* handle, int device, int error) {
  CudaCall call(__func__);
  CudaStream* const stream = call.machine.find_stream(handle, device);
  if (stream == nullptr) return;
  StreamOperation operation;
  operation.name = "fail";
  operation.run = [error] {
    const CudaCall later("fail");
    later.machine.break_device(error);
  };
  call.machine.enqueue(call.lock, *stream, std::move(operation));
}

void fakecuda_fail_allocations(uint64_t count) {
  const CudaCall call(__func__);
  call.machine.failing_allocations = count;
}

void fakecuda_stop() {
  if (!CudaMachine::exists()) return;
  CudaCall call(__func__);
  call.machine.stop(call.lock);
}

int fakecuda_device_error() {
  const CudaCall call(__func__);
  return call.machine.error;
}

// ---- counters
void fakecuda_reset_context(int device) {
  const CudaCall call(__func__);
  if (device >= 0 && device < call.machine.device_count()) call.machine.reset_context(device);
}

struct FakecudaStatistics {
  uint64_t kernels_run, kernels_skipped, copies, events_created, events_alive, streams_created, pinned_bytes;
  uint64_t contexts;  // a bit for each device
};

void fakecuda_statistics(FakecudaStatistics* out) {
  const CudaCall call(__func__);
  const CudaMachine& machine = call.machine;
  const Counters& counters = machine.counters;
  *out = {counters.kernels_run,   counters.kernels_skipped, counters.copies,         counters.events_created,
          machine.events_alive(), counters.streams_created, machine.memory.pinned(), 0};
  for (const int device : machine.contexts()) out->contexts |= uint64_t{1} << device;
}

// A line for each kernel: how often it was skipped, and its name. The caller passes the text to fakecuda_free.
char* fakecuda_skipped_kernels() {
  const CudaCall call(__func__);
  std::string text;
  for (const auto& [name, count] : call.machine.skipped) text += std::to_string(count) + " " + name + "\n";
  return strdup(text.c_str());
}

void fakecuda_free(void* text) { free(text); }

void fakecuda_set_operators_redirected() {
  CudaSettings::of_environment();
  Registry::get().operators_are_redirected = true;
}

// ---- races
void fakecuda_set_race_sites(Registry::MakeSite make_site) { Registry::get().make_site = make_site; }

int fakecuda_detects_races() { return CudaMachine::get().settings.detect_races; }

// How many findings have not been taken. The question does not create the machine, and a forked child, which cannot use
// the devices, has none.
int fakecuda_untaken_races() {
  if (!CudaMachine::exists()) return 0;
  const CudaCall call(__func__);
  return call.machine.is_of_parent() ? 0 : static_cast<int>(call.machine.races.count());
}

// Takes what was found so far. The caller passes the text to fakecuda_free.
char* fakecuda_take_races() {
  std::vector<machine::Finding> found;
  {
    const CudaCall call(__func__);
    found = call.machine.races.take();
  }
  std::string text;
  for (machine::Finding& finding : found) text += text_of(machine::describe(std::move(finding)));
  return strdup(text.c_str());
}
}
