// The seeded policy: the amount of work at each call of the host, and its order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sim/runtime/accelerator.h"

namespace sim::runtime {

class Policy {
 public:
  void start(WorkSchedule schedule, std::uint64_t seed) noexcept;
  WorkSchedule schedule() const noexcept { return schedule_; }

  int steps() noexcept;                            // that a call makes beyond its own needs, under jitter
  std::size_t choose(std::size_t count) noexcept;  // which of so many comes next; the first is the oldest

 private:
  std::uint64_t random() noexcept;

  WorkSchedule schedule_ = WorkSchedule::free;
  std::uint64_t state_ = 0;
};

}  // namespace sim::runtime
