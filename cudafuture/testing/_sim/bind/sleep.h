// What Python does while a thread of its own waits for a simulated device.
#pragma once

namespace sim {

// Threads that wait give the GIL up, and signals interrupt the main thread. Needs the GIL.
void install_sleep();

}  // namespace sim
