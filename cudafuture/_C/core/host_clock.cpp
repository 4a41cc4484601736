#include "core/host_clock.h"

namespace cudafuture {
namespace {

std::atomic<HostJoin> host_join{nullptr};
std::atomic<std::uint32_t> clock_generation{0};

}  // namespace

std::atomic<HostNow> host_now{nullptr};

void set_host_clock(HostNow now, HostJoin join) noexcept {
  clock_generation.fetch_add(1);
  host_join.store(join, std::memory_order_release);
  host_now.store(now, std::memory_order_release);
}

HostTime read_host_clock() noexcept {
  const std::uint32_t generation = clock_generation.load();
  const HostNow now = host_now.load(std::memory_order_acquire);
  return now == nullptr ? HostTime() : HostTime{now(), generation};
}

void join_host_clock(const HostTime& time) noexcept {
  const HostJoin join = host_join.load(std::memory_order_acquire);
  if (join != nullptr && time.generation == clock_generation.load()) join(time.seconds);
}

}  // namespace cudafuture
