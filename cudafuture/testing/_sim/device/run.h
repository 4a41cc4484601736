// How work runs: with the thread state of nobody, wherever the host happens to be when its turn comes.
#pragma once

#include <functional>

namespace sim {

// Grad mode, autocast, dispatch modes and profilers of the thread are put aside while `run` runs.
void run_apart(const std::function<void()>& run);

}  // namespace sim
