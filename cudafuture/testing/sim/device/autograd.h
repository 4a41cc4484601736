// Autograd's threads, one for each device.
#pragma once

namespace sim {

// Waits until these threads have released the Python objects of earlier backward passes. If a thread still holds one
// when the process exits, Python ends that thread, which aborts the process.
void settle_autograd();

}  // namespace sim
