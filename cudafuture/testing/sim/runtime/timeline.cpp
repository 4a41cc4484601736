#include "sim/runtime/timeline.h"

#include <algorithm>

namespace sim {

double duration(const Cost& cost, const Speeds& speeds) noexcept {
  if (cost.kind == WorkKind::delay) return cost.seconds;
  const double rate = cost.kind == WorkKind::compute ? speeds.compute : speeds.copy;
  return speeds.launch + cost.bytes / rate + cost.seconds;
}

double CopyEngines::finish(const Cost& cost, const Speeds& speeds, double ready) noexcept {
  const auto on = [&](double& engine) { return engine = std::max(ready, engine) + duration(cost, speeds); };
  switch (cost.kind) {
    case WorkKind::copy_in:
      return on(in_);
    case WorkKind::copy_out:
      return on(out_);
    case WorkKind::copy_peer:
      return on(peer_);
    case WorkKind::compute:
    case WorkKind::delay:
      break;
  }
  return ready + duration(cost, speeds);
}

}  // namespace sim
