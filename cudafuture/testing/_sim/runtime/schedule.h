// The seeded policy: the amount of work at each call of the host, and its order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/accelerator.h"

namespace sim::runtime {

class Policy {
 public:
  void start(Schedule schedule, std::uint64_t seed) noexcept;
  Schedule schedule() const noexcept { return schedule_; }

  int steps() noexcept;                            // that a call makes beyond its own needs, under jitter
  std::size_t choose(std::size_t count) noexcept;  // which of so many comes next; the first is the oldest

 private:
  std::uint64_t random() noexcept;

  Schedule schedule_ = Schedule::free;
  std::uint64_t state_ = 0;
};

}  // namespace sim::runtime
