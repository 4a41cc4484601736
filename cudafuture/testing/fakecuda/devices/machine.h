// A machine with CUDA devices that are memory of the host and queues of operations. The CUDA runtime of fakecuda
// (cudart/) translates each cuda* call into a few calls of the machine, and so does fakecuda_launch() with each
// operator of operators/.
//
//     host thread A      host thread B          the devices
//          |                  |
//          | enqueue          | enqueue         stream 1:  [kernel][record e]--------[copy]
//          v                  v                                        \                      <- events are positions
//     +----------------------------------+      stream 2:  [wait e]-----+[kernel][NCCL ...]      in streams
//     |  CudaMachine: one mutex          |
//     |    streams   first in, first out |      memory:    what the program sees   PROT_NONE: a host access faults
//     |    blocks    memory by address   |                 what operations use     the same pages, readable
//     |    captures  streams that record |
//     +----------------------------------+      captures:  an operation of a capturing stream goes into the graph
//          ^                  ^
//          | run when due     | run what a caller synchronises with
//     runner thread      synchronising thread   host functions run on a thread of their own
//
// An operation runs when it is at the front of its stream and one of these comes first:
//   - its delay is over (the schedule chooses the delay), and the runner thread gets to it;
//   - a host thread synchronises with it, and runs whatever has to run before.
// Work of different streams therefore overlaps and is reordered as the schedule likes, and only events order it, as on
// a GPU (CUDA C++ Programming Guide, "Asynchronous Concurrent Execution").
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "fakecuda/devices/capture.h"
#include "fakecuda/devices/memory.h"
#include "fakecuda/devices/races.h"
#include "fakecuda/devices/settings.h"
#include "fakecuda/devices/stream.h"

namespace fakecuda {

// The counters that fakecuda.statistics() returns.
struct Counters {
  uint64_t kernels_run = 0;
  uint64_t kernels_skipped = 0;
  uint64_t copies = 0;
  uint64_t events_created = 0;
  uint64_t streams_created = 0;
};

class CudaMachine {
 public:
  using Lock = std::unique_lock<std::mutex>;
  static CudaMachine& get();  // never destroyed: threads may use it until the process has gone
  static bool exists();       // false until the first call of get()
  // Returns true in a child of fork() whose parent has made the machine: the child cannot use it.
  bool is_of_parent() const { return is_of_parent_; }

  // A thread that holds this lock takes no other but the registry's. It guards everything below.
  std::mutex mutex;

  // ---- devices
  int device_count() const { return settings.devices; }
  void make_context(int device, const char* call);
  bool has_context(int device) const { return has_context_.at(static_cast<size_t>(device)); }
  std::vector<int> contexts() const;
  void reset_context(int device) { has_context_.at(static_cast<size_t>(device)) = false; }

  // ---- streams and events
  // A handle as CUDA's API has it: 0, 1 and 2 name a default stream. Null where there is no such stream.
  CudaStream* find_stream(const void* handle, int device);
  CudaStream* make_stream(int device, unsigned flags, int priority);
  void destroy_stream(CudaStream* stream);
  CudaEvent* make_event(int device, unsigned flags);
  bool is_event(const CudaEvent* event) const { return events_.count(event) != 0; }
  void destroy_event(CudaEvent* event);
  uint64_t events_alive() const { return events_.size(); }
  std::vector<CudaStream*> streams_of(int device) const;

  // ---- operations
  void enqueue(Lock& lock, CudaStream& stream, StreamOperation&& operation);
  RecordingPtr record(Lock& lock, CudaStream& stream, bool timed);
  void wait_for(Lock& lock, CudaStream& stream, const RecordingPtr& recording);
  // Run, or have others run, what is enqueued on a stream up to a position. The host has then seen it.
  void synchronize(Lock& lock, CudaStream& stream, uint64_t position);
  void synchronize_device(Lock& lock, int device);
  bool query(const CudaRecording& recording);  // true if it is reached; the host is then ordered after it
  bool query(CudaStream& stream);

  // ---- controls of tests
  GatePtr hold(Lock& lock, CudaStream& stream);
  void open(Gate& gate);
  void break_device(int error);  // an error that all later calls return (a "sticky" error)
  bool takes_a_failure();        // consumes one of failing_allocations
  void wake();                   // attempts may succeed now
  void stop(Lock& lock);         // the process ends: nothing runs from now on

  CudaSettings settings;
  Counters counters;
  CudaMemory memory;
  Races races;
  std::set<CapturePtr> captures;
  int error = 0;                            // a cudaError_t that all calls return; 0: none
  uint64_t failing_allocations = 0;         // how many of the next allocations fail
  std::map<std::string, uint64_t> skipped;  // kernels that were not run, by name

 private:
  CudaMachine();
  void leave_to_parent();
  void start_threads();
  Clock::time_point due();
  bool step(Lock& lock, CudaStream& stream);
  void run_unlocked(Lock& lock, CudaStream& stream);
  bool attempt_unlocked(Lock& lock, CudaStream& stream);
  void finish_front(CudaStream& stream);
  void wait_for_change(Lock& lock, const StreamOperation& front);
  void run_due();
  void run_host_functions();
  Clock::time_point run_due_of(Lock& lock, CudaStream& stream, bool& has_advanced);
  void push(Lock& lock, CudaStream& stream, StreamOperation&& operation);
  void join_legacy_streams(Lock& lock, CudaStream& stream);
  RecordingPtr position_of(CudaStream& stream);

  std::condition_variable changed_;  // for synchronising threads: an operation is over
  std::condition_variable due_;      // for the runner thread: an operation is due before `runner_sleeps_until_`
  std::condition_variable host_function_;
  int synchronising_ = 0;  // threads that wait for changed_
  bool runner_sleeps_ = false;
  Clock::time_point runner_sleeps_until_{};
  bool threads_started_ = false;
  bool stopped_ = false;
  bool is_of_parent_ = false;
  uint64_t random_ = 1;
  int blocking_streams_ = 0;  // that were made without cudaStreamNonBlocking
  std::vector<bool> has_context_;
  std::vector<CudaStream*> defaults_;
  std::unordered_set<const CudaStream*> streams_;   // that have not been destroyed
  std::unordered_set<const CudaStream*> draining_;  // that were destroyed with work queued
  std::unordered_set<const CudaEvent*> events_;
  std::vector<CudaStream*> busy_;  // with a queue that is not empty
};

// The device that cudaSetDevice selected in this thread.
int& current_device();

}  // namespace fakecuda
