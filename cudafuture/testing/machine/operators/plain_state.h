// Runs of device work, with a plain thread state, in any thread of the host.
#pragma once

#include <functional>

namespace machine {

// Grad mode, autocast, dispatch modes and profilers of the thread are put aside while `run` runs.
void run_apart(const std::function<void()>& run);

}  // namespace machine
