#include "sim/ops/randomness.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>

#include "sim/device/generator.h"

namespace sim {

c10::IValue host_generator(const c10::IValue& ours, int device) {
  const at::Generator generator = ours.isNone() ? default_generator(device) : ours.toGenerator();
  TORCH_CHECK(generator.device().is_privateuseone(), "Expected a 'sim' device type for generator but found '",
              generator.device().type(), "'");
  return at::detail::createCPUGenerator(draw_seed(generator));
}

SeededHost::SeededHost(std::uint64_t seed) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  before_ = generator.unsafeGetGeneratorImpl()->get_state();
  generator.set_current_seed(seed);
}

SeededHost::~SeededHost() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.unsafeGetGeneratorImpl()->set_state(*before_);
}

}  // namespace sim
