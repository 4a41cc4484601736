#include "machine/machine.h"

#include <driver_types.h>
#include <execinfo.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>
#include <utility>

namespace fakecuda {
namespace {

constexpr unsigned kNonBlocking = cudaStreamNonBlocking;
std::atomic<bool> machine_exists{false};

bool takes_part_in_races(Operation::Kind kind) {
  return kind == Operation::Kind::kWork || kind == Operation::Kind::kAttempt;
}

void print_stack() {
  void* frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
}

}  // namespace

int& current_device() {
  thread_local int device = 0;
  return device;
}

Machine& Machine::get() {
  static Machine* const machine = new Machine;
  return *machine;
}

bool Machine::exists() { return machine_exists; }

Machine::Machine() : settings(Settings::of_environment()) {
  random_ = settings.seed * 2654435761u + 88172645463325252u;
  races.enabled = settings.detect_races;
  memory.start(settings.devices, settings.memory);
  has_context_.resize(static_cast<size_t>(settings.devices));
  for (int device = 0; device < settings.devices; ++device) defaults_.push_back(make_stream(device, 0, 0));
  blocking_streams_ = 0;
  counters.streams_created = 0;
  pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().leave_to_parent(); });
  machine_exists = true;
}

// In a child of fork(), which has none of the threads: CUDA refuses to work there. An operation that was running in the
// parent never ends here, so nothing may wait for it, nor notify the threads of the parent.
void Machine::leave_to_parent() {
  error = cudaErrorInitializationError;
  stopped_ = true;
  synchronising_ = 0;
  runner_sleeps_ = false;
  mutex.unlock();
}

void Machine::start_threads() {
  if (std::exchange(threads_started_, true)) return;
  std::thread([this] { run_due(); }).detach();
  std::thread([this] { run_host_functions(); }).detach();
}

// ---- devices

void Machine::make_context(int device, const char* call) {
  if (has_context_.at(static_cast<size_t>(device))) return;
  has_context_[static_cast<size_t>(device)] = true;
  if (!settings.verbose) return;
  fprintf(stderr, "fakecuda: %s makes a context on device %d\n", call, device);
  print_stack();
}

std::vector<int> Machine::contexts() const {
  std::vector<int> found;
  for (int device = 0; device < settings.devices; ++device) {
    if (has_context_[static_cast<size_t>(device)]) found.push_back(device);
  }
  return found;
}

// ---- streams and events

Stream* Machine::find_stream(const void* handle, int device) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2)
    return defaults_.at(static_cast<size_t>(device));  // cudaStreamLegacy...
  auto* const stream = static_cast<Stream*>(const_cast<void*>(handle));
  return streams_.count(stream) != 0 ? stream : nullptr;
}

Stream* Machine::make_stream(int device, unsigned flags, int priority) {
  auto* const stream = new Stream;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  const uint64_t number = counters.streams_created++;
  const std::string name = defaults_.size() < static_cast<size_t>(settings.devices)
                               ? "the default stream"
                               : "stream " + std::to_string(number);
  stream->agent = races.add_agent(name + " of cuda:" + std::to_string(device));
  streams_.insert(stream);
  if ((flags & kNonBlocking) == 0) ++blocking_streams_;
  return stream;
}

// CUDA runtime API, cudaStreamDestroy: work in the stream is still done.
void Machine::destroy_stream(Stream* stream) {
  streams_.erase(stream);
  if (stream->completed < stream->enqueued) draining_.insert(stream);
  if ((stream->flags & kNonBlocking) == 0) --blocking_streams_;
}

Event* Machine::make_event(int device, unsigned flags) {
  auto* const event = new Event{device, flags, nullptr};
  events_.insert(event);
  ++counters.events_created;
  return event;
}

void Machine::destroy_event(Event* event) {
  events_.erase(event);
  delete event;
}

std::vector<Stream*> Machine::streams_of(int device) const {
  std::vector<Stream*> found;
  for (const auto* streams : {&streams_, &draining_}) {
    for (const Stream* stream : *streams) {
      if (stream->device == device) found.push_back(const_cast<Stream*>(stream));
    }
  }
  return found;
}

// ---- operations

Clock::time_point Machine::due() {
  double ms = settings.schedule == Schedule::kEager ? 0 : settings.delay_ms;
  if (settings.schedule == Schedule::kJitter) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    ms *= static_cast<double>(random_ >> 11) / static_cast<double>(uint64_t{1} << 53);
  }
  return Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6));
}

void Machine::enqueue(Lock& lock, Stream& stream, Operation&& operation) {
  if (stopped_) return;
  make_context(stream.device, operation.name);
  if (stream.capture != nullptr) {
    stream.capture->advance(&stream);
    stream.capture->nodes.push_back(std::move(operation));
    return;
  }
  join_legacy_streams(lock, stream);
  if (takes_part_in_races(operation.kind)) races.enqueue(stream, operation.accesses, operation.site);
  push(lock, stream, std::move(operation));
}

void Machine::push(Lock& lock, Stream& stream, Operation&& operation) {
  start_threads();
  operation.due = due();
  const bool earlier = !stream.busy && operation.due < runner_sleeps_until_;
  stream.queue.push_back(std::move(operation));
  ++stream.enqueued;
  if (!std::exchange(stream.busy, true)) busy_.push_back(&stream);
  if (settings.schedule == Schedule::kEager) {
    while (!stream.running && !stream.queue.empty() && step(lock, stream)) {
    }
  }
  if (earlier && runner_sleeps_ && stream.busy) due_.notify_one();
}

// The legacy default stream comes after all earlier work of the streams that were made without cudaStreamNonBlocking,
// and those come after its own (CUDA runtime API, "Stream synchronization behavior").
void Machine::join_legacy_streams(Lock& lock, Stream& stream) {
  if (blocking_streams_ == 0) return;
  Stream& legacy = *defaults_[static_cast<size_t>(stream.device)];
  const auto wait_for_all_of = [&](Stream& other) { wait_for(lock, stream, position_of(other)); };
  if (&stream != &legacy) {
    if ((stream.flags & kNonBlocking) == 0) wait_for_all_of(legacy);
    return;
  }
  for (Stream* other : streams_of(stream.device)) {
    if (other != &legacy && (other->flags & kNonBlocking) == 0) wait_for_all_of(*other);
  }
}

// Everything that is enqueued on a stream now.
RecordingPtr Machine::position_of(Stream& stream) {
  auto recording = std::make_shared<Recording>();
  recording->stream = &stream;
  recording->position = stream.enqueued;
  recording->clock = races.snapshot(stream);
  return recording;
}

RecordingPtr Machine::record(Lock& lock, Stream& stream, bool timed) {
  make_context(stream.device, "cudaEventRecord");
  if (stream.capture == nullptr) join_legacy_streams(lock, stream);
  const RecordingPtr recording = position_of(stream);
  recording->capture = stream.capture;
  if (stream.capture != nullptr) {
    stream.capture->advance(&stream);
    const auto& before = stream.capture->follows[&stream];
    recording->follows.assign(before.begin(), before.end());
    return recording;
  }
  if (stopped_) return recording;
  ++recording->position;
  Operation operation;
  operation.kind = Operation::Kind::kRecord;
  operation.name = "cudaEventRecord";
  if (timed) operation.recording = recording;
  push(lock, stream, std::move(operation));
  return recording;
}

void Machine::wait_for(Lock& lock, Stream& stream, const RecordingPtr& recording) {
  races.join(stream, *recording);
  if (stopped_ || recording->stream == &stream || recording->reached()) return;
  make_context(stream.device, "cudaStreamWaitEvent");
  Operation operation;
  operation.kind = Operation::Kind::kWait;
  operation.name = "cudaStreamWaitEvent";
  operation.recording = recording;
  push(lock, stream, std::move(operation));
}

bool Machine::query(const Recording& recording) {
  if (!recording.reached()) return false;
  races.host_saw(recording);
  return true;
}

bool Machine::query(Stream& stream) {
  if (stream.completed < stream.enqueued) return false;
  races.host_saw(stream);
  return true;
}

void Machine::synchronize_device(Lock& lock, int device) {
  std::vector<std::pair<Stream*, uint64_t>> wanted;
  for (Stream* stream : streams_of(device)) wanted.emplace_back(stream, stream->enqueued);
  for (const auto& [stream, position] : wanted) {
    synchronize(lock, *stream, position);
    races.host_saw(*stream);
  }
}

// ---- controls of tests

GatePtr Machine::hold(Lock& lock, Stream& stream) {
  auto gate = std::make_shared<Gate>();
  Operation operation;
  operation.kind = Operation::Kind::kHold;
  operation.name = "hold";
  operation.gate = gate;
  enqueue(lock, stream, std::move(operation));
  return gate;
}

void Machine::open(Gate& gate) {
  gate.is_open = true;
  wake();
}

void Machine::break_device(int new_error) {
  if (error == 0) error = new_error;
  wake();
}

bool Machine::takes_a_failure() {
  if (failing_allocations == 0) return false;
  --failing_allocations;
  return true;
}

void Machine::wake() {
  if (synchronising_ > 0) changed_.notify_all();
  if (runner_sleeps_) due_.notify_one();
}

void Machine::stop(Lock& lock) {
  if (std::exchange(stopped_, true)) return;
  error = cudaErrorCudartUnloading;
  changed_.notify_all();
  due_.notify_all();
  host_function_.notify_all();
  // The caller may destroy the memory of running kernels, so they finish first. A host function may never return.
  const auto runs_kernel = [](const Stream* stream) {
    return stream->running && stream->queue.front().kind != Operation::Kind::kHostFunction;
  };
  while (std::any_of(busy_.begin(), busy_.end(), runs_kernel)) changed_.wait_for(lock, std::chrono::milliseconds(1));
}

}  // namespace fakecuda
