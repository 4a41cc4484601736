#include "sim/runtime/host_clock.h"

#include <algorithm>
#include <atomic>

namespace sim {
namespace {

std::atomic<std::uint64_t> starts{0};
std::atomic<HostClock::Find> find_clock{nullptr};

thread_local constinit bool thread_has_ended = false;  // its thread-local objects are being destroyed

struct OwnClock {
  OwnClock() = default;
  ~OwnClock() { thread_has_ended = true; }
  OwnClock(const OwnClock&) = delete;
  OwnClock& operator=(const OwnClock&) = delete;

  const std::shared_ptr<HostClock> clock = std::make_shared<HostClock>();
};

}  // namespace

HostClock& HostClock::current() noexcept {
  static auto* const of_ended_threads = new HostClock;
  if (thread_has_ended) return *of_ended_threads;
  const Find find = find_clock.load(std::memory_order_acquire);
  return find == nullptr ? *own() : find();
}

const std::shared_ptr<HostClock>& HostClock::own() {
  thread_local const OwnClock own;
  return own.clock;
}

void HostClock::restart() noexcept { starts.fetch_add(1); }

void HostClock::set_find(Find find) noexcept { find_clock.store(find, std::memory_order_release); }

double HostClock::now() const noexcept {
  const std::lock_guard lock(mutex_);
  return generation_ == starts.load() ? seconds_ : 0;
}

void HostClock::spend(double seconds) noexcept {
  const std::lock_guard lock(mutex_);
  catch_up();
  seconds_ += std::max(seconds, 0.0);
}

void HostClock::join(double seconds) noexcept {
  const std::lock_guard lock(mutex_);
  catch_up();
  seconds_ = std::max(seconds_, seconds);
}

void HostClock::catch_up() noexcept {
  const std::uint64_t generation = starts.load();
  if (generation_ == generation) return;
  generation_ = generation;
  seconds_ = 0;
}

}  // namespace sim
