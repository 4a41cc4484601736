// The race detector: it knows what the host and each stream have seen of each other, and the last accesses to memory.
//
//     the host enqueues work on a stream ──► StreamClock::tick, touch ──► Shadow ──► Findings ──► Report
//     an event is recorded on a stream   ──► StreamClock::snapshot
//     a stream waits for an event        ──► StreamClock::join
//     the host waits for an event        ──► host_saw
//
// Everything is computed when the host enqueues, so no verdict depends on when work runs. The machine calls it under
// its own lock.
#pragma once

#include <string>
#include <vector>

#include "machine/findings.h"
#include "machine/shadow.h"
#include "machine/stream_clock.h"

namespace machine {

class RaceDetector {
 public:
  void restart();  // forgets the agents and all accesses; findings stay until they are taken

  Agent add_agent(std::string name);  // a stream, by the name that reports show
  ClockEpoch tick(StreamClock& stream) { return stream.tick(host_); }
  // Notes an access of a piece of work, and keeps its races. `touch` has the work's epoch and site.
  void touch(const MemoryAccess& access, const VectorClock& clock, const Touch& touch);

  bool host_saw(const ClockSnapshot& seen);  // returns true if the host has seen something new
  ClockEpoch tick_host();                    // the host accesses memory
  const VectorClock& host() const noexcept { return host_.clock; }

  Shadow shadow;
  Findings findings;

 private:
  std::vector<std::string> names_{"the host"};  // of the agents
  HostVectorClock host_;
};

}  // namespace machine
