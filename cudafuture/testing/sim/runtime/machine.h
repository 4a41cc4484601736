// The parts of the accelerator and what connects them. Everything here needs the lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "machine/race_detector.h"
#include "sim/runtime/accelerator.h"
#include "sim/runtime/host_clock.h"
#include "sim/runtime/memory.h"
#include "sim/runtime/pinned.h"
#include "sim/runtime/runner.h"

namespace sim::runtime {

constexpr int kPriorities = kLowestPriority - kHighestPriority + 1;
constexpr int kPoolStreams = kPriorities * kStreamsPerPriority;  // of each device
constexpr int kStreamsPerDevice = 1 + kPoolStreams + kPriorities * kOwnStreamsPerPriority;

// Objects that were dropped under the lock. Their destructors may need other locks, or the accelerator.
struct Trash {
  std::vector<SitePtr> sites;
  std::vector<Finding> findings;
  std::vector<std::exception_ptr> errors;
};

struct SimDevice {
  std::array<std::unique_ptr<Stream>, kStreamsPerDevice> streams;  // by id; made when first used
  std::array<int, kPriorities> next{};                             // of the pool, by priority
  std::array<int, kPriorities> own{};                              // streams outside of it, by priority
  CopyEngines engines;
  std::optional<AcceleratorMemory> memory;
  std::exception_ptr error;
  std::atomic<bool> has_context{false};
};

class Machine {
 public:
  Machine();

  void start(Lock& lock, const Settings& settings);
  void stop(Lock& lock);

  SimDevice& device(int index);  // throws std::invalid_argument for one that is not there, as does the next
  Stream& stream(StreamName name);
  SimDevice& device_of(const Stream& stream) { return devices[static_cast<std::size_t>(stream.name.device)]; }
  AcceleratorMemory& memory(int index);

  void submit(Lock& lock, Stream& stream, Work&& work);
  void wait(Lock& lock, Stream& stream, const RecordingPtr& recording);
  bool query(Lock& lock, const RecordingPtr& recording);
  void synchronize(Lock& lock, const RecordingPtr& recording);
  void synchronize_device(Lock& lock, int index);
  void throw_error_of(int index) const;

  void begin_capture(Stream& stream, CaptureMode mode);
  void end_capture(Stream& stream);                                      // throws if a host call has broken it
  void refuse_in_captures(const char* call, const CapturePtr& capture);  // of what the host asks about; null: in none
  void clear_error(int index);

  void* allocate(Lock& lock, int index, std::size_t bytes, Stream& stream, const SitePtr& site);
  void empty_cache(Lock& lock);
  void host_access(const std::vector<MemoryAccess>& accesses, const SitePtr& site);
  Statistics statistics() const;

  std::mutex mutex;
  std::atomic<int> device_count{0};
  std::atomic<bool> any_capture{false};  // in progress
  Settings settings;
  std::array<SimDevice, kMaxDevices> devices;
  RaceDetector races;
  Pinned pinned;
  Runner runner;
  Statistics counts;  // of calls
  Trash trash;

 private:
  void drop_everything();
  void refuse_with_captures_of(int index);  // of a call that waits for all streams of a device
  void broke(Stream& stream, std::exception_ptr error, Report&& report);
  void host_saw(const Recording& recording);
  std::vector<RecordingPtr> record_all(const SimDevice& device) const;
  void reclaim(Lock& lock, int index);
  void poison(Lock& lock, Stream& stream, void* begin, std::size_t bytes);

  std::vector<CapturePtr> captures_;  // in progress
  std::uint64_t captures_begun_ = 0;  // since the process began
  std::uint64_t generation_ = 0;      // of start() and stop()
};

// A call of the accelerator: refused after a fork. It holds the lock; objects dropped under it are destroyed outside.
class MachineCall {
 public:
  explicit MachineCall(Machine& machine);
  ~MachineCall();
  MachineCall(const MachineCall&) = delete;
  MachineCall& operator=(const MachineCall&) = delete;

  Lock lock;

 private:
  Machine& machine_;
};

}  // namespace sim::runtime
