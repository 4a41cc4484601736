// Autograd's threads, one for each device.
#pragma once

namespace sim {

// Waits until they have let go of what was computed before. A thread that still holds a piece of Python when the
// process exits is ended by Python, which aborts the process.
void settle_autograd();

}  // namespace sim
