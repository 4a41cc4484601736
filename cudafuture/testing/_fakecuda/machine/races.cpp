#include "machine/races.h"

#include <cstdint>
#include <utility>

namespace fakecuda {

sim::Agent Races::add_agent(std::string name) {
  names_.push_back(std::move(name));
  return static_cast<sim::Agent>(names_.size() - 1);
}

void Races::enqueue(CudaStream& stream, const std::vector<CudaAccess>& accesses, const sim::SitePtr& site) {
  if (!enabled) return;
  stream.clock.join(host_);
  const sim::Touch touch{stream.clock.tick(stream.agent), false, site};
  stream.snapshot.reset();
  for (const CudaAccess& access : accesses) {
    const auto begin = reinterpret_cast<std::uintptr_t>(access.begin);
    for (sim::Conflict& conflict : shadow_.touch({begin, begin + access.size, access.writes}, stream.clock, touch)) {
      if (findings_.is_known(conflict)) continue;
      std::string earlier = names_[conflict.earlier.epoch.agent];
      std::string later = names_[conflict.later.epoch.agent];
      findings_.add(std::move(conflict), std::move(earlier), std::move(later));
    }
  }
  shadow_.take_dropped();  // under the machine's lock: torch frees their frames later, in a call that has Python's
}

std::shared_ptr<const sim::VectorClock> Races::snapshot(CudaStream& stream) {
  if (!enabled) return nullptr;
  if (stream.snapshot == nullptr) stream.snapshot = std::make_shared<const sim::VectorClock>(stream.clock);
  return stream.snapshot;
}

void Races::join(CudaStream& stream, const CudaRecording& recording) {
  if (recording.clock == nullptr) return;
  stream.clock.join(*recording.clock);
  stream.snapshot.reset();
}

void Races::host_saw(const CudaRecording& recording) {
  if (recording.clock != nullptr) host_.join(*recording.clock);
}

void Races::host_saw(CudaStream& stream) {
  if (enabled) host_.join(stream.clock);
}

void Races::forget(const void* begin, size_t size) {
  const auto from = reinterpret_cast<std::uintptr_t>(begin);
  if (enabled) shadow_.forget(from, from + size);
}

}  // namespace fakecuda
