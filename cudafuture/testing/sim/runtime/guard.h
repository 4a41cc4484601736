// An explanation on stderr when host code crashes at an address of device memory.
#pragma once

namespace sim {

// From now on such a fault is explained on stderr, and then passed to the previous handler. One call is enough.
void install_fault_handler() noexcept;

}  // namespace sim
