#include "sim/runtime/machine.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <thread>
#include <utility>

#include "sim/runtime/process.h"

namespace sim {

thread_local CaptureMode capture_mode = CaptureMode::global;

}  // namespace sim

namespace sim::runtime {
namespace {

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

Machine::Machine()
    : runner([this](Stream& stream, std::exception_ptr error, Report&& report) {
        broke(stream, std::move(error), std::move(report));
      }) {}

void Machine::start(Lock& lock, const Settings& new_settings) {
  if (new_settings.devices < 0 || new_settings.devices > kMaxDevices) {
    throw std::invalid_argument("the simulated accelerator has 0 to " + std::to_string(kMaxDevices) + " devices, not " +
                                std::to_string(new_settings.devices));
  }
  if (new_settings.memory > kDeviceBytes) {
    throw std::invalid_argument("a simulated device has at most " + mebibytes(kDeviceBytes) + " of memory, not " +
                                mebibytes(new_settings.memory));
  }
  runner.settle(lock);
  watch_forks();
  device_count.store(0);
  runner.dropped_tasks = 0;
  drop_everything();
  settings = new_settings;
  runner.start(settings.schedule, settings.seed);
  counts = {};
  HostClock::restart();
  trash.findings = races.findings.take();
  device_count.store(settings.devices);
}

void Machine::stop(Lock& lock) {
  runner.settle(lock);
  device_count.store(0);
  drop_everything();
  runner.start(settings.schedule, settings.seed);
}

void Machine::drop_everything() {
  ++generation_;
  captures_.clear();
  any_capture = false;
  for (SimDevice& device : devices) {
    for (const auto& stream : device.streams) {
      if (stream == nullptr) continue;
      runner.drop_queue(*stream);
      stream->reset(generation_);
    }
    device.next = {};
    device.engines.reset();
    device.has_context = false;
    trash.errors.push_back(std::exchange(device.error, nullptr));
  }
  for (SimDevice& device : devices) {
    if (!device.memory.has_value()) continue;
    device.memory->release(races.shadow);
    device.memory->reset_totals();
    device.memory->reset_peak();
  }
  pinned.start(races.shadow);
  races.restart();
}

SimDevice& Machine::device(int index) {
  if (index >= 0 && index < device_count.load(std::memory_order_relaxed)) {
    return devices[static_cast<std::size_t>(index)];
  }
  throw std::invalid_argument("there is no " + name_of_device(index) + ": the simulated accelerator has " +
                              std::to_string(device_count.load()) + " devices");
}

Stream& Machine::stream(StreamName name) {
  SimDevice& owner = device(name.device);
  if (name.id < 0 || name.id >= kStreamsPerDevice) throw std::invalid_argument("there is no " + name_of(name));
  auto& stream = owner.streams[static_cast<std::size_t>(name.id)];
  if (stream == nullptr) {
    stream = std::make_unique<Stream>(name);
    stream->reset(generation_);
  }
  if (stream->clock.agent() == kHost) stream->clock.reset(races.add_agent(name_of(name)));
  return *stream;
}

AcceleratorMemory& Machine::memory(int index) {
  SimDevice& owner = device(index);
  if (!owner.memory.has_value()) owner.memory.emplace(index);
  return *owner.memory;
}

void Machine::submit(Lock& lock, Stream& stream, Work&& work) {
  SimDevice& device = device_of(stream);
  if (stream.capture != nullptr) return;  // a node of a graph that is not launched
  ++counts.submitted;
  if (device.error != nullptr) {  // `work` is left to the caller, who destroys it without the lock
    ++runner.dropped_tasks;
    return;
  }
  const ClockEpoch epoch =
      settings.detect ? races.enqueue(stream.clock, work.accesses, work.site) : races.tick(stream.clock);
  const double ready = std::max(stream.time, HostClock::current().now());
  stream.time = device.engines.finish(work.cost, stream.speeds.value_or(settings.speeds), ready);
  runner.push(stream, StreamTask{std::move(work.run), std::move(work.site)});
  for (const MemoryAccess& access : work.accesses) pinned.note(access, stream, epoch);
  runner.after_call(lock);
}

void Machine::wait(Lock& lock, Stream& stream, const RecordingPtr& recording) {
  ++counts.waited;
  const bool is_recorded = recording != nullptr && recording->is_of(generation_);
  if (is_recorded && recording->capture != nullptr && !recording->capture->has_ended) {
    stream.capture = recording->capture;  // the stream joins the capture
  } else if (is_recorded && stream.capture != nullptr) {
    stream.capture->broken_by = "a wait for work outside of the capture (cudaErrorStreamCaptureIsolation)";
    throw CaptureError(
        "a capturing stream cannot wait for an event that was recorded outside of the capture: CUDA ends "
        "the capture with cudaErrorStreamCaptureIsolation");
  } else if (is_recorded) {
    throw_error_of(stream.name.device);
    stream.clock.join(recording->seen);
    stream.time = std::max(stream.time, recording->time);
    if (!recording->reached() && recording->stream != &stream) runner.push(stream, RecordingPtr(recording));
  }
  runner.after_call(lock);
}

bool Machine::query(Lock& lock, const RecordingPtr& recording) {
  if (recording == nullptr || !recording->is_of(generation_)) return true;
  refuse_in_captures("a query of an event", recording->capture);
  throw_error_of(recording->stream->name.device);
  const bool reached = recording->reached();
  if (reached) host_saw(*recording);
  runner.after_query(lock, {recording});
  return reached;
}

void Machine::synchronize(Lock& lock, const RecordingPtr& recording) {
  if (recording == nullptr || !recording->is_of(generation_)) return;
  refuse_in_captures("a synchronization with an event", recording->capture);
  throw_error_of(recording->stream->name.device);
  runner.run_until(lock, {recording});
  throw_error_of(recording->stream->name.device);
  host_saw(*recording);
}

void Machine::synchronize_device(Lock& lock, int index) {
  refuse_in_captures("a synchronization with a device", nullptr);
  if (!captures_.empty()) refuse_with_captures_of(index);
  const std::vector<RecordingPtr> all = record_all(device(index));
  throw_error_of(index);
  runner.run_until(lock, all);
  throw_error_of(index);
  for (const RecordingPtr& recording : all) host_saw(*recording);
}

void Machine::begin_capture(Stream& stream, CaptureMode mode) {
  if (stream.capture != nullptr) throw CaptureError(name_of(stream.name) + " is in a capture already");
  stream.capture = captures_.emplace_back(std::make_shared<Capture>(++captures_begun_, mode));
  any_capture = true;
}

void Machine::end_capture(Stream& stream) {
  const CapturePtr capture = stream.capture;
  if (capture == nullptr) throw CaptureError(name_of(stream.name) + " is in no capture");
  capture->has_ended = true;
  std::erase(captures_, capture);
  any_capture = !captures_.empty();
  for (SimDevice& device : devices) {
    for (const auto& each : device.streams) {
      if (each != nullptr && each->capture == capture) each->capture.reset();
    }
  }
  if (!capture->broken_by.empty()) throw CaptureError("the capture has ended with an error, by " + capture->broken_by);
}

// The host cannot query an event that a capture recorded. Any other call here is one that CUDA calls potentially
// unsafe.
void Machine::refuse_in_captures(const char* call, const CapturePtr& capture) {
  if (capture != nullptr) {
    capture->broken_by = std::string(call) + " that was recorded inside it (cudaErrorCapturedEvent)";
    throw CaptureError(std::string(call) +
                       " that was recorded inside a stream capture: CUDA refuses it with "
                       "cudaErrorCapturedEvent, and ends the capture");
  }
  if (captures_.empty()) return;
  bool is_refused = false;
  for (const CapturePtr& other : captures_) {
    const bool is_own = other->thread == std::this_thread::get_id();
    if (!refuses_unsafe_call(other->mode, is_own, capture_mode)) continue;
    other->broken_by = std::string(call) + " (cudaErrorStreamCaptureUnsupported)";
    is_refused = true;
  }
  if (!is_refused) return;
  throw CaptureError(std::string(call) +
                     " during a stream capture, by a thread that is not in relaxed capture mode: CUDA "
                     "refuses it with cudaErrorStreamCaptureUnsupported, and ends the capture");
}

// CUDA Programming Guide, "Prohibited and Unhandled Operations": the host cannot synchronize with a handle that
// encompasses a capture. The modes do not change that.
void Machine::refuse_with_captures_of(int index) {
  for (const auto& stream : device(index).streams) {
    if (stream == nullptr || stream->capture == nullptr) continue;
    stream->capture->broken_by = "a synchronization with its device (cudaErrorStreamCaptureUnsupported)";
    throw CaptureError("a synchronization with " + name_of_device(index) + " while " + name_of(stream->name) +
                       " is in a capture: CUDA refuses it in every capture mode with "
                       "cudaErrorStreamCaptureUnsupported, and ends the capture");
  }
}

void Machine::throw_error_of(int index) const {
  const std::exception_ptr& error = devices[static_cast<std::size_t>(index)].error;
  if (error != nullptr) std::rethrow_exception(error);
}

void Machine::clear_error(int index) {
  trash.errors.push_back(std::exchange(device(index).error, nullptr));
  for (Finding& forgotten : races.findings.take_errors_of(index)) trash.findings.push_back(std::move(forgotten));
}

void* Machine::allocate(Lock& lock, int index, std::size_t bytes, Stream& stream, const SitePtr& site) {
  AcceleratorMemory& from = memory(index);
  from.free_deferred(races.shadow, runner.changes());
  void* pointer = from.take(bytes, stream, settings.memory);
  if (pointer == nullptr && !Runner::inside_work()) {
    reclaim(lock, index);
    pointer = from.take(bytes, stream, settings.memory);
  }
  if (pointer == nullptr) {
    throw OutOfMemory(name_of_device(index) + " has no room for " + std::to_string(bytes) + " bytes: of " +
                      mebibytes(settings.memory) + " that it has, " + mebibytes(from.statistics().allocated.current) +
                      " are in use. Free tensors, or start the simulated accelerator with more memory");
  }
  if (settings.detect) races.allocate(stream.clock, pointer, bytes, site);
  if (settings.poison && device_of(stream).error == nullptr) poison(lock, stream, address_space::alias(pointer), bytes);
  runner.after_call(lock);
  return pointer;
}

// Fills the memory at once if the stream's own work cannot still use it: an unordered reader must not find the old
// contents.
void Machine::poison(Lock& lock, Stream& stream, void* begin, std::size_t bytes) {
  if (!stream.is_idle()) {
    runner.push(stream, Fill{begin, bytes});
    return;
  }
  lock.unlock();
  std::memset(begin, kPoison, bytes);
  lock.lock();
}

// As a device does that gives memory back: waits until it has done everything.
void Machine::reclaim(Lock& lock, int index) {
  AcceleratorMemory& from = memory(index);
  std::vector<RecordingPtr> wanted = record_all(device(index));
  for (RecordingPtr& recording : from.deferred_for()) wanted.push_back(std::move(recording));
  runner.run_until(lock, wanted);
  from.release(races.shadow);
}

void Machine::empty_cache(Lock& lock) {
  for (int i = 0; i < device_count.load(); ++i) {
    if (!devices[static_cast<std::size_t>(i)].memory.has_value()) continue;
    reclaim(lock, i);
    devices[static_cast<std::size_t>(i)].memory->give_pages_back();
  }
  pinned.release(races.shadow);
}

void Machine::host_access(const std::vector<MemoryAccess>& accesses, const SitePtr& site) {
  if (!settings.detect) return;
  std::vector<MemoryAccess> noted;
  const auto in_flight = [&](const MemoryAccess& access) { return pinned.in_flight(access); };
  std::copy_if(accesses.begin(), accesses.end(), std::back_inserter(noted), in_flight);
  if (!noted.empty()) races.host_access(noted, site);
}

Statistics Machine::statistics() const {
  Statistics all = counts;
  all.executed = runner.executed;
  all.dropped = runner.dropped_tasks;
  for (const SimDevice& device : devices) {
    if (!device.memory.has_value()) continue;
    all.allocated_bytes += device.memory->statistics().allocated.current;
    all.reserved_bytes += device.memory->statistics().reserved.current;
    all.deferred_blocks += device.memory->deferred();
  }
  return all;
}

void Machine::broke(Stream& stream, std::exception_ptr error, Report&& report) {
  SimDevice& device = device_of(stream);
  (device.error == nullptr ? device.error : trash.errors.emplace_back()) = std::move(error);
  trash.sites.push_back(report.later);
  races.findings.add(std::move(report), stream.name.device);
  for (const auto& other : device.streams) {
    if (other != nullptr) runner.drop_queue(*other);
  }
}

void Machine::host_saw(const Recording& recording) {
  if (!recording.is_of(generation_)) return;
  HostClock::current().join(recording.time);
  if (races.host_saw(recording.seen)) pinned.host_saw(races.host());
}

std::vector<RecordingPtr> Machine::record_all(const SimDevice& device) const {
  std::vector<RecordingPtr> all;
  for (const auto& stream : device.streams) {
    if (stream != nullptr && stream->clock.agent() != kHost) all.push_back(stream->record());
  }
  return all;
}

MachineCall::MachineCall(Machine& machine) : machine_(machine) {
  refuse_after_fork();
  lock = Lock(machine.mutex);
}

MachineCall::~MachineCall() {
  Trash trash = std::exchange(machine_.trash, {});
  const std::vector<SitePtr> sites = machine_.races.shadow.take_dropped();
  const std::vector<Item> items = std::exchange(machine_.runner.dropped(), {});
  lock.unlock();
}

}  // namespace sim::runtime
