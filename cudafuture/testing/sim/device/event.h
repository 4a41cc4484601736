// The event that torch holds: the latest recording, and the device on which it was made.
#pragma once

#include "sim/runtime/accelerator.h"

namespace sim {

struct Event {
  RecordingPtr recording;
  int device = 0;
};

// An event must be made, queried, waited for and destroyed while its own device is the current device: otherwise a CUDA
// driver would make a context on the current device. If the check is on, violations are reported.
void check_device(int device, const char* call) noexcept;
void set_strict_devices(bool strict) noexcept;

}  // namespace sim
