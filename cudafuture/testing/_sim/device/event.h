// What torch holds as an event: the recording that was made last, and the device that it was made on.
#pragma once

#include "runtime/accelerator.h"

namespace sim {

struct Event {
  RecordingPtr recording;
  int device = 0;
};

// An event is made, asked, waited for and destroyed with its own device current: elsewhere a CUDA driver would make a
// context on the device that happens to be. Reported when the check is on.
void check_device(int device, const char* call) noexcept;
void set_strict_devices(bool strict) noexcept;

}  // namespace sim
