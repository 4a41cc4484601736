#include "sim/runtime/schedule.h"

namespace sim::runtime {
namespace {

constexpr int kMostSteps = 3;

}  // namespace

void Policy::start(WorkSchedule schedule, std::uint64_t seed) noexcept {
  schedule_ = schedule;
  state_ = seed;
}

int Policy::steps() noexcept { return static_cast<int>(random() % (kMostSteps + 1)); }

std::size_t Policy::choose(std::size_t count) noexcept {
  return schedule_ == WorkSchedule::free || count < 2 ? 0 : static_cast<std::size_t>(random() % count);
}

// SplitMix64: the same everywhere, and good from the first number on whatever the seed.
std::uint64_t Policy::random() noexcept {
  std::uint64_t x = state_ += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

}  // namespace sim::runtime
