// The vector clock of a stream: the progress of the other agents that its work has seen.
#pragma once

#include <cstdint>
#include <memory>

#include "machine/vector_clock.h"

namespace machine {

// The vector clock of a stream at the moment when an event was recorded.
struct ClockSnapshot {
  ClockEpoch epoch;                          // of the stream; a clock that has seen it has seen all of `clock`
  std::shared_ptr<const VectorClock> clock;  // null while the stream has done nothing
};

// The vector clock of all host threads together.
struct HostVectorClock {
  VectorClock clock;
  std::uint64_t version = 0;  // changes with `clock`
};

class StreamClock {
 public:
  // Starts afresh. The host is the agent of a stream that has none yet.
  void reset(Agent agent = kHost) noexcept;
  Agent agent() const noexcept { return agent_; }
  const VectorClock& vector() const noexcept { return clock_; }

  ClockEpoch tick(const HostVectorClock& host);  // of a piece of work that the host enqueues now
  void join(const ClockSnapshot& seen);          // the stream waits for an event
  ClockSnapshot snapshot();                      // an event is recorded

 private:
  Agent agent_ = kHost;
  VectorClock clock_;
  std::shared_ptr<const VectorClock> snapshot_;  // of clock_, until that changes
  std::uint64_t host_version_ = 0;               // of the host's clock when it was joined
};

inline void StreamClock::reset(Agent agent) noexcept {
  agent_ = agent;
  clock_ = {};
  snapshot_.reset();
  host_version_ = 0;
}

inline ClockEpoch StreamClock::tick(const HostVectorClock& host) {
  if (host_version_ != host.version) {
    clock_.join(host.clock);
    host_version_ = host.version;
  }
  snapshot_.reset();
  return clock_.tick(agent_);
}

// A join ticks: so a clock that has seen an epoch of this stream has seen all that the stream had seen then.
inline void StreamClock::join(const ClockSnapshot& seen) {
  if (seen.clock == nullptr || clock_.has_seen(seen.epoch)) return;
  clock_.join(*seen.clock);
  clock_.tick(agent_);
  snapshot_.reset();
}

inline ClockSnapshot StreamClock::snapshot() {
  const ClockEpoch epoch{agent_, clock_.of(agent_)};
  if (epoch.time == 0) return {epoch, nullptr};
  if (snapshot_ == nullptr) snapshot_ = std::make_shared<const VectorClock>(clock_);
  return {epoch, snapshot_};
}

}  // namespace machine
