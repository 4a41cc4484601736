// Passes the clock of a host thread on with torch's thread state: autograd's threads use the clock of the thread that
// called backward(), which is blocked meanwhile.
#pragma once

namespace sim {

void install_host_clock();

}  // namespace sim
