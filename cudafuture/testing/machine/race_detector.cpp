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

void RaceDetector::touch(const MemoryAccess& access, const VectorClock& clock, const Touch& touch) {
  for (Conflict& conflict : shadow.touch(access, clock, touch)) {
    if (findings.is_known(conflict)) continue;
    std::string earlier = names_[conflict.earlier.epoch.agent];
    std::string later = names_[conflict.later.epoch.agent];
    findings.add(std::move(conflict), std::move(earlier), std::move(later));
  }
}

bool RaceDetector::host_saw(const ClockSnapshot& seen) {
  if (seen.clock == nullptr || host_.clock.has_seen(seen.epoch)) return false;
  host_.clock.join(*seen.clock);
  ++host_.version;
  return true;
}

ClockEpoch RaceDetector::tick_host() {
  ++host_.version;
  return host_.clock.tick(kHost);
}

}  // namespace machine
