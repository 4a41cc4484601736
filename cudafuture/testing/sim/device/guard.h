// Devices, streams and events as torch asks for them.
#pragma once

namespace sim {

// Makes the simulated accelerator the guard of torch's PrivateUse1 devices; once.
void install_guard();

}  // namespace sim
