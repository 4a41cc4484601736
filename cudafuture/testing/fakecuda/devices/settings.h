// Settings from the environment; `python -m cudafuture.testing.fakecuda` sets these variables.
//
//   FAKECUDA_SCHEDULE  eager: an operation runs in the call that enqueues it, unless it has to wait
//                      jitter: after a random delay, at most FAKECUDA_DELAY_MS (2)
//                      lazy (the default): after FAKECUDA_DELAY_MS (50), unless a host thread synchronises with it
//   FAKECUDA_SEED      seeds the delays of jitter (1)
//   FAKECUDA_DEVICES   the number of devices (2)
//   FAKECUDA_MEMORY    the memory of each device, in MiB (4096)
//   FAKECUDA_RACES     1: detect races
//   FAKECUDA_VERBOSE   1: report contexts, kernels that are not run, and unsupported calls on stderr
#pragma once

#include <cstddef>
#include <cstdint>

namespace fakecuda {

enum class CudaSchedule { kEager, kJitter, kLazy };

struct CudaSettings {
  CudaSchedule schedule = CudaSchedule::kLazy;
  double delay_ms = 50;
  uint64_t seed = 1;
  int devices = 2;
  size_t memory = size_t{4} << 30;  // bytes
  bool detect_races = false;
  bool verbose = false;

  static CudaSettings of_environment();
};

}  // namespace fakecuda
