// Hooks around the sleep of a Python thread that waits for a simulated device.
#pragma once

namespace sim {

// Threads that wait release the GIL, and signals interrupt the main thread. Needs the GIL.
void install_sleep();

}  // namespace sim
