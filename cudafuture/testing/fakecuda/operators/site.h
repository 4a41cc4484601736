#pragma once

namespace fakecuda {

// Has the race detector take the stack of Python at each call.
void install_sites();

}  // namespace fakecuda
