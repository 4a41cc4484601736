#include "sim/device/host_clock.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <utility>

#include "sim/runtime/host_clock.h"
#include "sim/runtime/runner.h"

namespace sim {
namespace {

// Of CarriedClock alone: torch itself uses this kind in tests only.
auto kind() { return c10::DebugInfoKind::TEST_INFO; }

struct CarriedClock final : c10::DebugInfoBase {
  explicit CarriedClock(std::shared_ptr<HostClock> clock) : clock(std::move(clock)) {}
  const std::shared_ptr<HostClock> clock;
};

// The clock becomes the lowest debug information of its thread, so other code pushes and pops its own on top of it. A
// thread that already has debug information does not pass its clock on until that information is popped.
HostClock& find_host_clock() noexcept {
  // This comes before own(): thread-local objects are destroyed in reverse order, and once the own clock is destroyed,
  // current() no longer calls this function.
  const auto* const carried = static_cast<const CarriedClock*>(c10::ThreadLocalDebugInfo::get(kind()));
  const std::shared_ptr<HostClock>& own = HostClock::own();
  if (carried != nullptr) return *carried->clock;
  if (!runtime::Runner::inside_work() && c10::ThreadLocalDebugInfo::current() == nullptr) {
    c10::ThreadLocalDebugInfo::_push(kind(), std::make_shared<CarriedClock>(own));
  }
  return *own;
}

}  // namespace

void install_host_clock() { HostClock::set_find(&find_host_clock); }

}  // namespace sim
