// A clear word instead of a bare crash when host code follows an address of device memory.
#pragma once

namespace sim {

// From now on such a fault is explained on stderr; whoever handled faults before then gets it. Once is enough.
void install_fault_handler() noexcept;

}  // namespace sim
