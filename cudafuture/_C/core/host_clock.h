// The virtual time of host threads, which a simulated accelerator keeps.
//
// Each host thread has its own virtual time. When one thread hands work to another, the second thread joins the first
// thread's time: its own becomes the later of the two. A future stores the time of its completion, and a thread that
// waits for the future joins that time.
//
// Only a simulated accelerator sets a clock. Without a clock, reading the time costs one load of a null pointer.
#pragma once

#include <atomic>
#include <cstdint>

namespace cudafuture {

// A point in virtual time.
struct HostTime {
  double seconds = 0;
  std::uint32_t generation = 0;  // of the clock it was read from, counted by set_host_clock(); 0: no clock
};

// Both functions act on the calling thread. They are called with no lock of the core held.
using HostNow = double (*)() noexcept;               // returns the thread's virtual time in seconds
using HostJoin = void (*)(double seconds) noexcept;  // sets the thread's virtual time to `seconds`, if that is later

// Sets the clock, or removes it (null). Times of earlier clocks have no effect from then on.
void set_host_clock(HostNow now, HostJoin join) noexcept;

extern std::atomic<HostNow> host_now;
inline bool has_host_clock() noexcept { return host_now.load(std::memory_order_acquire) != nullptr; }

HostTime read_host_clock() noexcept;
inline HostTime host_time() noexcept { return has_host_clock() ? read_host_clock() : HostTime(); }

// Makes the calling thread join `time`, unless `time` was read from an earlier clock.
void join_host_clock(const HostTime& time) noexcept;
inline void join_host_time(const HostTime& time) noexcept {
  if (time.generation != 0) join_host_clock(time);
}

// Returns the later of two points. A point of a newer clock is later than any of an older one.
inline HostTime later_of(const HostTime& a, const HostTime& b) noexcept {
  if (a.generation != b.generation) return a.generation > b.generation ? a : b;
  return a.seconds > b.seconds ? a : b;
}

}  // namespace cudafuture
