// The virtual time of host threads: one clock per thread, all at zero when the accelerator starts.
//
// These clocks measure time. For the order of accesses, the race detector has one vector clock for all host threads.
//
// Lock: each clock has its own, taken under any other; nothing is taken or called under it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

namespace sim {

class HostClock {
 public:
  // Returns the clock of the calling thread, or of the thread that it works for. Threads whose thread-local objects are
  // being destroyed share one clock. Do not keep the reference.
  static HostClock& current() noexcept;

  // Returns the clock of the calling thread itself.
  static const std::shared_ptr<HostClock>& own();

  // Sets all clocks to zero.
  static void restart() noexcept;

  // Sets a function that finds the clock of the thread that the calling thread works for, or else its own.
  using Find = HostClock& (*)() noexcept;
  static void set_find(Find find) noexcept;

  double now() const noexcept;
  void spend(double seconds) noexcept;
  void join(double seconds) noexcept;  // goes on no earlier than this

 private:
  void catch_up() noexcept;

  mutable std::mutex mutex_;
  double seconds_ = 0;
  std::uint64_t generation_ = 0;  // of the start that `seconds_` counts from
};

}  // namespace sim
