#include "machine/race_detector.h"

#include <cstdint>
#include <utility>

namespace machine {

void RaceDetector::restart() {
  names_.resize(1);
  host_ = {};
  shadow.forget(0, UINTPTR_MAX);
}

Agent RaceDetector::add_agent(std::string name) {
  names_.push_back(std::move(name));
  return static_cast<Agent>(names_.size() - 1);
}

ClockEpoch RaceDetector::enqueue(StreamClock& stream, const std::vector<MemoryAccess>& accesses, const SitePtr& site) {
  const HostAction action{tick(stream), site};
  for (const MemoryAccess& access : accesses) touch(access, stream.vector(), action);
  return action.epoch;
}

void RaceDetector::allocate(StreamClock& stream, const void* begin, std::size_t bytes, const SitePtr& site) {
  const HostAction action{tick(stream), site, true};
  touch(MemoryAccess::of(begin, bytes, true), stream.vector(), action);
}

void RaceDetector::host_access(const std::vector<MemoryAccess>& accesses, const SitePtr& site) {
  ++host_.version;
  const HostAction action{host_.clock.tick(kHost), site};
  for (const MemoryAccess& access : accesses) touch(access, host_.clock, action);
}

void RaceDetector::touch(const MemoryAccess& access, const VectorClock& clock, const HostAction& action) {
  for (Conflict& conflict : shadow.touch(access, clock, action)) {
    const std::string& earlier = names_[conflict.earlier.epoch.agent];
    const std::string& later = names_[conflict.later.epoch.agent];
    findings.add(std::move(conflict), earlier, later);
  }
}

bool RaceDetector::host_saw(const ClockSnapshot& seen) {
  if (seen.clock == nullptr || host_.clock.has_seen(seen.epoch)) return false;
  host_.clock.join(*seen.clock);
  ++host_.version;
  return true;
}

}  // namespace machine
