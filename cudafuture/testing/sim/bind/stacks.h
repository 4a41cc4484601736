// Python stacks: taken when the host does something, written out when a report is shown.
#pragma once

namespace sim {

void install_stacks();

}  // namespace sim
