// A point in a stream, for waits of the host and of other streams.
//
// A recording needs no place in the queue: it is reached when the stream has done what had been enqueued before it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "machine/capture_mode.h"
#include "machine/stream_clock.h"

namespace sim {

using namespace machine;

namespace runtime {
class Stream;

// A stream capture in progress. The streams that are in it, and the events that were recorded there, share it.
struct Capture {
  Capture(std::uint64_t number, CaptureMode mode) : number(number), mode(mode) {}

  const std::uint64_t number;  // of no other capture of the process; never 0
  const CaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();  // that began it
  bool has_ended = false;
  std::string broken_by;  // the host call that ended it with an error; empty: none
};
using CapturePtr = std::shared_ptr<Capture>;
}  // namespace runtime

// Constant once made.
class Recording {
 public:
  bool is_of(std::uint64_t generation_now) const noexcept { return generation == generation_now; }
  bool reached() const noexcept;  // so are all those of before the last start()

  runtime::Stream* stream = nullptr;
  std::uint64_t generation = 0;  // counts calls of start()
  std::uint64_t position = 0;    // how many items were enqueued before
  ClockSnapshot seen;            // by the stream
  double time = 0;
  runtime::CapturePtr capture;  // of an event that was recorded inside one
};

}  // namespace sim
