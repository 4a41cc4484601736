#include "sim/device/event.h"

#include <atomic>
#include <string>
#include <utility>

#include "sim/device/current.h"
#include "sim/device/here.h"

namespace sim {
namespace {

std::atomic<bool> is_strict{false};

}  // namespace

void set_strict_devices(bool strict) noexcept { is_strict = strict; }

void check_device(int device, const char* call) noexcept {
  if (current_device() == device) return;
  Accelerator::get().make_context(current_device());
  if (!is_strict.load(std::memory_order_relaxed)) return;
  try {
    Report report;
    report.kind = Report::Kind::wrong_device;
    report.summary = std::string(call) + " of an event of sim:" + std::to_string(device) +
                     " while sim:" + std::to_string(current_device()) +
                     " is the current device: on CUDA this makes a context there; set the device first";
    report.later = here(call);
    Accelerator::get().report(std::move(report));
  } catch (...) {
    // in a forked child, or out of memory: the finding is dropped
  }
}

}  // namespace sim
