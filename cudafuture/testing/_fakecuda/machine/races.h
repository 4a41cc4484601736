// The race detector: the simulated accelerator's vector clocks and shadow memory, fed with what is enqueued here.
//
// The functions are called with the machine's lock, except where they say otherwise. Without `enabled` they do nothing.
// All host threads count as one agent, as in the simulated accelerator.
#pragma once

#include <string>
#include <vector>

#include "machine/registry.h"
#include "machine/stream.h"
#include "runtime/findings.h"
#include "runtime/shadow.h"
#include "runtime/vector_clock.h"

namespace fakecuda {

class Races {
 public:
  bool enabled = false;

  // Returns the site of a call. Needs Python's lock, so it is called without the machine's.
  sim::SitePtr here(const char* operation) const {
    const Registry::MakeSite make_site = Registry::get().make_site;
    return enabled && make_site != nullptr ? make_site(operation) : nullptr;
  }

  sim::Agent add_agent(std::string name);
  void enqueue(CudaStream& stream, const std::vector<CudaAccess>& accesses, const sim::SitePtr& site);
  std::shared_ptr<const sim::VectorClock> snapshot(CudaStream& stream);
  void join(CudaStream& stream, const CudaRecording& recording);
  void host_saw(const CudaRecording& recording);
  void host_saw(CudaStream& stream);
  void forget(const void* begin, size_t size);
  std::vector<sim::runtime::Finding> take() { return findings_.take(); }

 private:
  std::vector<std::string> names_{"the host"};  // of the agents
  sim::VectorClock host_;
  sim::Shadow shadow_;
  sim::runtime::Findings findings_;
};

}  // namespace fakecuda
