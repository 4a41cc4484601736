// Vector clocks: the progress of every agent that each agent has seen.
//
// An agent issues accesses in an order of its own: the host, or one stream. An access happened before another if the
// clock of the second has reached the epoch of the first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace machine {

using Agent = std::uint32_t;
constexpr Agent kHost = 0;  // all host threads together; streams are numbered from 1

// One moment of one agent.
struct ClockEpoch {
  Agent agent = kHost;
  std::uint64_t time = 0;
  friend bool operator==(const ClockEpoch&, const ClockEpoch&) = default;
};

class VectorClock {
 public:
  std::uint64_t of(Agent agent) const noexcept { return agent < times_.size() ? times_[agent] : 0; }
  bool has_seen(ClockEpoch epoch) const noexcept { return of(epoch.agent) >= epoch.time; }

  ClockEpoch tick(Agent agent) {
    if (agent >= times_.size()) times_.resize(agent + 1);
    return {agent, ++times_[agent]};
  }

  void join(const VectorClock& other) {
    if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
    for (std::size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
  }

 private:
  std::vector<std::uint64_t> times_;
};

}  // namespace machine
