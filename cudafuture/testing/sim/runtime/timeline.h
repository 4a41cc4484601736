// Virtual time: when each piece of work would begin and end on a device with given speeds.
//
// It is worked out when the work is submitted, from the order of streams and events alone, so it does not depend on
// when the work is really run. Streams compute side by side at full speed; the copies of a device in one direction
// share one copy engine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

// In bytes and seconds.
struct Speeds {
  double compute = 1e12;  // bytes that a kernel reads and writes, per second
  double copy = 25e9;     // bytes per second between host and device, each way, and between devices
  double launch = 5e-6;   // seconds of each piece of work, besides its bytes
};

enum class WorkKind : std::uint8_t { compute, copy_in, copy_out, copy_peer, delay };

// Cost of a piece of work in virtual time.
struct Cost {
  WorkKind kind = WorkKind::compute;
  double bytes = 0;
  double seconds = 0;  // in addition to the time of the bytes
};

double duration(const Cost& cost, const Speeds& speeds) noexcept;

// The copy engines of one device: one for each direction, and each does one copy at a time.
class CopyEngines {
 public:
  // When work ends that could begin at `ready`: a copy first waits for its engine.
  double finish(const Cost& cost, const Speeds& speeds, double ready) noexcept;
  void reset() noexcept { *this = {}; }

 private:
  double in_ = 0;  // when each is free again
  double out_ = 0;
  double peer_ = 0;
};

}  // namespace sim
