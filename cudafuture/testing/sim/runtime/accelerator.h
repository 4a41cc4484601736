// The simulated accelerator: devices, streams, events, memory, and one clock of each kind.
//
//     host ── submit / record / wait ──► Stream (first in, first out) ──► run: by the host thread that steps it
//                      │
//                      ├──► happens-before (VectorClock), Shadow ──► findings     known at submission
//                      └──► virtual time (Cost, Speeds)                           whatever runs when
//
// There are no threads. Work runs inside the calls that the host makes, and the schedule says when:
//   free    as early as streams and events allow;
//   lazy    as late as possible: when the host waits, and then only the work that it waits for;
//   jitter  in between: at each call a seeded choice of how much of which stream.
// So a program with one host thread runs the same way each time, and a process can exit with work queued. Several host
// threads may call at once; a piece of work runs outside the lock, in one of them.
//
// A query counts as a short wait: query() returns the present state, and under `lazy` and `jitter` then runs a part of
// the queried work, so that a loop that polls comes to an end.
//
// A piece of work that throws breaks its device, as a CUDA error does: queued work is dropped there, and so is new
// work. Every query and synchronization of that device throws the error until clear_error().
//
// Lock: one mutex, the submission lock, under which vector clocks, shadow, queues and memory change. No work runs, and
// no Site is made or written out, under it. Each HostClock, which measures virtual time, has a lock of its own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine/capture_mode.h"
#include "machine/findings.h"
#include "machine/gate.h"
#include "machine/shadow.h"
#include "machine/site.h"
#include "sim/runtime/timeline.h"

namespace sim {

using namespace machine;

constexpr int kMaxDevices = 8;
constexpr int kStreamsPerPriority = 32;
constexpr int kOwnStreamsPerPriority = 64;  // outside of the pool
constexpr int kHighestPriority = -3;        // lower is more urgent; a more urgent priority is clamped to this
constexpr int kLowestPriority = 0;          // a less urgent priority is refused, as by CUDA's pool

enum class WorkSchedule : std::uint8_t { free, jitter, lazy };

struct Settings {
  int devices = 1;
  WorkSchedule schedule = WorkSchedule::free;
  std::uint64_t seed = 0;
  bool poison = true;  // fresh device and pinned memory holds 0xFF bytes: NaN in every float type
  bool detect = true;  // look for races
  std::size_t memory = std::size_t{4} << 30;  // bytes of each device
  Speeds speeds;
};

// A stream by its name: id 0 is the default stream of its device.
struct StreamName {
  int device = 0;
  std::int64_t id = 0;
  friend bool operator==(const StreamName&, const StreamName&) = default;
};

// A piece of work. It owns no device memory: the memory that it touches may be freed before it runs, as on a device.
struct Work {
  std::function<void()> run;
  std::vector<MemoryAccess> accesses;  // device memory and pinned host memory, at the addresses that tensors show
  SitePtr site;
  Cost cost;
};

// The state of an event when it was recorded: a point in a stream. Waiters hold the recording, not the event, since the
// event may be recorded again.
class Recording;
using RecordingPtr = std::shared_ptr<Recording>;

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A host call that a stream capture does not allow. The capture has ended then, as CUDA's does.
struct CaptureError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

extern thread_local CaptureMode capture_mode;  // of the calling thread

struct Statistics {
  std::uint64_t submitted = 0;  // pieces of work
  std::uint64_t executed = 0;
  std::uint64_t dropped = 0;
  std::uint64_t recorded = 0;         // events
  std::uint64_t waited = 0;           // waits of streams for events
  std::uint64_t allocated_bytes = 0;  // now in use, all devices
  std::uint64_t reserved_bytes = 0;   // taken from the arenas, all devices
  std::uint64_t deferred_blocks = 0;  // freed, and held back for other streams
};

// Bytes of one kind: now, at most since the last reset, and in all.
struct ByteCount {
  std::uint64_t current = 0;
  std::uint64_t peak = 0;
  std::uint64_t added = 0;
  std::uint64_t removed = 0;

  void add(std::uint64_t bytes) noexcept {
    current += bytes;
    added += bytes;
    peak = std::max(peak, current);
  }
  void remove(std::uint64_t bytes) noexcept {
    current -= bytes;
    removed += bytes;
  }
  void reset_totals() noexcept { added = removed = 0; }
  void reset_peak() noexcept { peak = current; }
};

// The memory of one device.
struct MemoryStatistics {
  ByteCount allocated;  // in use by tensors
  ByteCount reserved;   // taken from the arena: in use, free, or held back for other streams
};

class Accelerator {
 public:
  static Accelerator& get() noexcept;  // never destroyed

  // Starts afresh: queued work is dropped, clocks return to zero, reports and errors are forgotten. Memory that is in
  // use stays valid, and streams keep their names.
  void start(const Settings& settings);
  void stop();  // no devices any more; memory in use stays valid
  Settings settings() const;
  int device_count() const noexcept;

  // ---- streams
  StreamName new_stream(int device, int priority);  // out of the pool, round-robin
  StreamName own_stream(int device, int priority);  // outside of it; throws std::runtime_error when there are no more
  bool has_stream(StreamName stream) const noexcept;
  int priority_of(StreamName stream) const noexcept;

  void submit(StreamName stream, Work&& work);
  RecordingPtr record(StreamName stream);                       // reached at once where the stream is idle
  void wait(StreamName stream, const RecordingPtr& recording);  // the stream waits; null: an event never recorded

  // ---- the host queries and waits. A wait orders the host after the work that it waited for; so does a query that
  // returns true.
  bool query(const RecordingPtr& recording);
  bool query(StreamName stream);
  void synchronize(const RecordingPtr& recording);
  void synchronize(StreamName stream);
  void synchronize(int device);

  // ---- stream captures, as far as host calls can break them: what is enqueued in one never runs
  void begin_capture(StreamName stream, CaptureMode mode = CaptureMode::global);
  void end_capture(StreamName stream);  // throws CaptureError if a host call has broken it
  // Returns a number that identifies the capture that the stream is in, among all of the process; 0 if it is in none.
  std::uint64_t capture_of(StreamName stream) const;
  // Returns true if all work of the stream has finished. Unlike query(), it orders and advances nothing, and ends no
  // capture: for a library that chooses among streams.
  bool is_idle(StreamName stream) const;

  // ---- contexts: a device has one from its first use on. CUDA's cost about half a gigabyte each.
  void make_context(int device) noexcept;
  bool has_context(int device) const noexcept;

  // ---- tests hold streams back
  GatePtr hold(StreamName stream);
  void open(const GatePtr& gate);

  // ---- virtual time, in seconds since start(). Each host thread has a clock (HostClock), which moves when it waits.
  double now() const;
  double time_of(const RecordingPtr& recording) const;                      // when it is reached
  void spend(double seconds);                                               // the host computes
  void set_speeds(std::optional<StreamName> stream, const Speeds& speeds);  // of one stream, or of all

  // ---- device memory: a caching allocator, ordered by streams. Never touched at the address that it returns. A device
  // that is full first waits for all its streams, and throws OutOfMemory if that does not help.
  void* allocate(int device, std::size_t bytes, StreamName stream, SitePtr site);
  void deallocate(void* pointer) noexcept;
  void record_use(const void* pointer, StreamName stream);  // record_stream: no reuse before the stream has got here
  std::optional<int> device_of(const void* pointer) const noexcept;
  // Returns the address at which work accesses the memory that tensors show at `pointer`. Any other address is returned
  // unchanged.
  static void* alias(const void* pointer) noexcept;
  void empty_cache();  // releases free memory
  MemoryStatistics memory_statistics(int device) const;
  void reset_memory_totals(int device);
  void reset_memory_peak(int device);

  // ---- pinned host memory: cached too, and not handed out again before the streams that use it have got there. An
  // allocation counts as a query, since torch's allocator for CUDA queries events and calls cudaHostAlloc.
  void* allocate_pinned(std::size_t bytes);
  void deallocate_pinned(void* pointer) noexcept;
  bool is_pinned(const void* pointer) const noexcept;
  bool any_pinned_in_flight() const noexcept;                                 // cheap: can host_access() find anything?
  void host_access(const std::vector<MemoryAccess>& accesses, SitePtr site);  // a CPU operation touches this memory

  // ---- findings: one for each pair of places; at most 1000 are kept until they are taken
  void report(Report&& report);
  std::vector<Report> take_reports();
  std::size_t report_count() const noexcept;  // cheap
  std::exception_ptr error_of(int device) const;
  void clear_error(int device);  // and its reports
  Statistics statistics() const;

  // Called around every sleep of a host thread, outside the lock: the embedding language releases its own lock there.
  // The check is called now and then during the sleep, and ends the wait by throwing; without one only a change does.
  void set_sleep_hooks(void* (*before)(), void (*after)(void*), void (*check)() = nullptr) noexcept;
  // Wraps each run of work: puts a clean thread state in force. Null: none.
  void set_run_hook(void (*hook)(const std::function<void()>& run)) noexcept;

 private:
  Accelerator();
  struct State;         // is runtime::Machine (machine.h), which this header does not show
  State* const state_;  // never destroyed
};

}  // namespace sim
