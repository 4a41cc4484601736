// Streams that one owner has for itself, outside of the device's pool.
//
// A pool hands its streams out round-robin, so its streams are shared. An own stream has one owner at a time. It is
// never destroyed: allocators may still record events on it for memory that it has used. When its owner is gone, the
// next owner on that device gets it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace cudafuture {

// Makes a stream of the priority on the device with that index, and returns its id for c10; throws.
using MakeStream = std::int64_t (*)(int device, int priority);
void set_make_stream(c10::DeviceType type, MakeStream make) noexcept;

// Lock: mutex_ guards the list; no device call is made under it.
class OwnStreams {
 public:
  static OwnStreams& get() noexcept;  // never destroyed

  // Lower is more urgent: 0 is the default, -1 high. A device type whose runtime makes no streams for others gives one
  // of its pool. Throws what the device has to say.
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
