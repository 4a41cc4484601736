// A stream: a queue of operations. An event is recorded as a position in a stream.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fakecuda/devices/launch.h"
#include "machine/gate.h"
#include "machine/site.h"
#include "machine/stream_clock.h"

namespace fakecuda {

using namespace machine;
using Clock = std::chrono::steady_clock;
struct CudaStream;
struct CudaCapture;

// A position in a stream, and what the stream had seen of other streams when it got there.
struct CudaRecording {
  CudaStream* stream = nullptr;
  uint64_t position = 0;
  Clock::time_point time{};                               // when it was reached; for timed events
  ClockSnapshot seen;                                     // by the stream; empty without race detection
  std::shared_ptr<CudaCapture> capture;                   // recorded inside this capture
  std::vector<std::pair<CudaStream*, uint64_t>> follows;  // in a capture: what of each stream comes before
  bool reached() const;
};
using RecordingPtr = std::shared_ptr<CudaRecording>;

struct StreamOperation {
  enum class Kind {
    kWork,          // a kernel or a copy: `run`, once, without the lock
    kAttempt,       // `attempt` until it returns true, without the lock
    kHostFunction,  // `run`, on the thread of host functions
    kRecord,
    kWait,
    kSleep,  // takes `duration`
    kHold,
  };
  Kind kind = Kind::kWork;
  const char* name = "";
  std::function<void()> run;
  std::function<bool()> attempt;
  RecordingPtr recording;  // kRecord, kWait
  GatePtr gate;            // kHold
  std::chrono::nanoseconds duration{0};
  std::vector<MemoryAccess> accesses;
  SitePtr site;  // of the call, for the race detector
  Clock::time_point due{};
  Clock::time_point begun{};  // kSleep
};

// Never freed: recordings name it.
struct CudaStream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  std::deque<StreamOperation> queue;
  uint64_t enqueued = 0;   // operations, ever
  uint64_t completed = 0;  // of those
  bool running = false;    // the front runs without the lock
  bool busy = false;       // in the machine's list of streams that have something to do
  std::shared_ptr<CudaCapture> capture;
  StreamClock clock;  // for the race detector
};

inline bool CudaRecording::reached() const { return stream->completed >= position; }

struct CudaEvent {
  int device = -1;
  unsigned flags = 0;
  RecordingPtr recording;  // null: never recorded
};

}  // namespace fakecuda
