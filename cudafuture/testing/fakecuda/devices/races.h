// The race detector of the devices, fed with what is enqueued on them.
//
// The functions are called with the machine's lock, except where they say otherwise. Without `enabled` nothing is
// noted, and there is nothing to find.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "fakecuda/devices/registry.h"
#include "fakecuda/devices/stream.h"
#include "machine/race_detector.h"

namespace fakecuda {

class Races {
 public:
  bool enabled = false;

  // Returns the site of a call. Needs Python's lock, so it is called without the machine's.
  SitePtr here(const char* operation) const {
    const Registry::MakeSite make_site = Registry::get().make_site;
    return enabled && make_site != nullptr ? make_site(operation) : nullptr;
  }

  void add_stream(CudaStream& stream, std::string name) { stream.clock.reset(detector_.add_agent(std::move(name))); }
  // Notes the accesses of an operation that the machine enqueues, and keeps its races.
  void note_accesses(CudaStream& stream, const StreamOperation& operation);
  void host_saw(const CudaRecording& recording) { detector_.host_saw(recording.seen); }
  void host_saw(CudaStream& stream) { detector_.host_saw(stream.clock.snapshot()); }
  void forget(const void* begin, size_t size);
  std::vector<Finding> take() { return detector_.findings.take(); }
  size_t count() const noexcept { return detector_.findings.count(); }

 private:
  RaceDetector detector_;
};

}  // namespace fakecuda
