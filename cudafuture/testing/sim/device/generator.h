// Random numbers: each random operation draws a seed here when it is enqueued, and a fresh generator of the host's
// makes its numbers when it runs. So what comes out depends on the order of the program and not on the schedule.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace sim {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
std::uint64_t draw_seed(const at::Generator& generator);  // of a simulated device

}  // namespace sim
