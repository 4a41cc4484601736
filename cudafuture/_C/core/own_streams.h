// Streams with one owner each, which the library creates itself.
//
// torch hands out the streams of its own pool round-robin, so they are shared with the program, which may capture one
// or keep it busy. An own stream has one owner at a time. It is never destroyed, because allocators may still record
// events on it for memory that it has used. When its owner releases it, the next owner on that device gets it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <mutex>
#include <vector>

namespace cudafuture {

// Lock: mutex_ guards the list; no device call is made under it.
class OwnStreams {
 public:
  static OwnStreams& get() noexcept;  // never destroyed

  // False: the device type's runtime creates no streams for others, and acquire() returns streams of torch's pool.
  static bool can_create(c10::DeviceType type) noexcept;

  // Returns a stream. Lower is more urgent: 0 is the default, -1 high. Throws the device's error.
  c10::Stream acquire(c10::Device device, int priority);
  void release(const c10::Stream& stream, int priority) noexcept;

 private:
  struct Idle {
    c10::Stream stream;
    int priority;
  };

  std::mutex mutex_;
  std::vector<Idle> idle_;  // without an owner
};

}  // namespace cudafuture
