// The race detector: it knows what the host and each stream have seen of each other, and the last accesses to memory.
//
//     the host enqueues work on a stream ──► enqueue     ──► StreamClock::tick ──► Shadow ──► Findings ──► Report
//     the host hands out memory          ──► allocate    ──► the same
//     the host touches pinned memory     ──► host_access ──► the same, with the clock of the host
//     an event is recorded on a stream   ──► StreamClock::snapshot
//     a stream waits for an event        ──► StreamClock::join
//     the host waits for an event        ──► host_saw
//
// Findings are computed when the host enqueues, so no verdict depends on when work runs. The machine calls it under its
// own lock.
#pragma once

#include <cstddef>
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

  // ---- actions of the host: each notes its accesses and keeps the races of these
  // Returns the epoch of a piece of work that the host enqueues on a stream.
  ClockEpoch enqueue(StreamClock& stream, const std::vector<MemoryAccess>& accesses, const SitePtr& site);
  // Memory is handed out on a stream: that counts as a write.
  void allocate(StreamClock& stream, const void* begin, std::size_t bytes, const SitePtr& site);
  // The host itself reads or writes memory.
  void host_access(const std::vector<MemoryAccess>& accesses, const SitePtr& site);

  // Returns the epoch of a piece of work whose accesses are not noted.
  ClockEpoch tick(StreamClock& stream) { return stream.tick(host_); }
  bool host_saw(const ClockSnapshot& seen);  // returns true if the host has seen something new
  const VectorClock& host() const noexcept { return host_.clock; }

  Shadow shadow;
  Findings findings;

 private:
  void touch(const MemoryAccess& access, const VectorClock& clock, const HostAction& action);

  std::vector<std::string> names_{"the host"};  // of the agents
  HostVectorClock host_;
};

}  // namespace machine
