#include "fakecuda/devices/machine.h"

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

bool takes_part_in_races(StreamOperation::Kind kind) {
  return kind == StreamOperation::Kind::kWork || kind == StreamOperation::Kind::kAttempt;
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

CudaMachine& CudaMachine::get() {
  static CudaMachine* const machine = new CudaMachine;
  return *machine;
}

bool CudaMachine::exists() { return machine_exists; }

CudaMachine::CudaMachine() : settings(CudaSettings::of_environment()) {
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
void CudaMachine::leave_to_parent() {
  error = cudaErrorInitializationError;
  is_of_parent_ = stopped_ = true;
  synchronising_ = 0;
  runner_sleeps_ = false;
  mutex.unlock();
}

void CudaMachine::start_threads() {
  if (std::exchange(threads_started_, true)) return;
  std::thread([this] { run_due(); }).detach();
  std::thread([this] { run_host_functions(); }).detach();
}

// ---- devices

void CudaMachine::make_context(int device, const char* call) {
  if (has_context_.at(static_cast<size_t>(device))) return;
  has_context_[static_cast<size_t>(device)] = true;
  if (!settings.verbose) return;
  fprintf(stderr, "fakecuda: %s makes a context on device %d\n", call, device);
  print_stack();
}

std::vector<int> CudaMachine::contexts() const {
  std::vector<int> found;
  for (int device = 0; device < settings.devices; ++device) {
    if (has_context_[static_cast<size_t>(device)]) found.push_back(device);
  }
  return found;
}

// ---- streams and events

CudaStream* CudaMachine::find_stream(const void* handle, int device) {
  if (reinterpret_cast<uintptr_t>(handle) <= 2)
    return defaults_.at(static_cast<size_t>(device));  // cudaStreamLegacy...
  auto* const stream = static_cast<CudaStream*>(const_cast<void*>(handle));
  return streams_.count(stream) != 0 ? stream : nullptr;
}

CudaStream* CudaMachine::make_stream(int device, unsigned flags, int priority) {
  auto* const stream = new CudaStream;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  const uint64_t number = counters.streams_created++;
  const std::string name = defaults_.size() < static_cast<size_t>(settings.devices)
                               ? "the default stream"
                               : "stream " + std::to_string(number);
  races.add_stream(*stream, name + " of cuda:" + std::to_string(device));
  streams_.insert(stream);
  if ((flags & kNonBlocking) == 0) ++blocking_streams_;
  return stream;
}

// CUDA runtime API, cudaStreamDestroy: work in the stream is still done.
void CudaMachine::destroy_stream(CudaStream* stream) {
  streams_.erase(stream);
  if (stream->completed < stream->enqueued) draining_.insert(stream);
  if ((stream->flags & kNonBlocking) == 0) --blocking_streams_;
}

CudaEvent* CudaMachine::make_event(int device, unsigned flags) {
  auto* const event = new CudaEvent{device, flags, nullptr};
  events_.insert(event);
  ++counters.events_created;
  return event;
}

void CudaMachine::destroy_event(CudaEvent* event) {
  events_.erase(event);
  delete event;
}

std::vector<CudaStream*> CudaMachine::streams_of(int device) const {
  std::vector<CudaStream*> found;
  for (const auto* streams : {&streams_, &draining_}) {
    for (const CudaStream* stream : *streams) {
      if (stream->device == device) found.push_back(const_cast<CudaStream*>(stream));
    }
  }
  return found;
}

// ---- operations

Clock::time_point CudaMachine::due() {
  double ms = settings.schedule == CudaSchedule::kEager ? 0 : settings.delay_ms;
  if (settings.schedule == CudaSchedule::kJitter) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    ms *= static_cast<double>(random_ >> 11) / static_cast<double>(uint64_t{1} << 53);
  }
  return Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6));
}

void CudaMachine::enqueue(Lock& lock, CudaStream& stream, StreamOperation&& operation) {
  if (stopped_) return;
  make_context(stream.device, operation.name);
  if (stream.capture != nullptr) {
    stream.capture->advance(&stream);
    stream.capture->nodes.push_back(std::move(operation));
    return;
  }
  join_legacy_streams(lock, stream);
  if (takes_part_in_races(operation.kind)) races.note_accesses(stream, operation);
  push(lock, stream, std::move(operation));
}

void CudaMachine::push(Lock& lock, CudaStream& stream, StreamOperation&& operation) {
  start_threads();
  operation.due = due();
  const bool earlier = !stream.busy && operation.due < runner_sleeps_until_;
  stream.queue.push_back(std::move(operation));
  ++stream.enqueued;
  if (!std::exchange(stream.busy, true)) busy_.push_back(&stream);
  if (settings.schedule == CudaSchedule::kEager) {
    while (!stream.running && !stream.queue.empty() && step(lock, stream)) {
    }
  }
  if (earlier && runner_sleeps_ && stream.busy) due_.notify_one();
}

// The legacy default stream comes after all earlier work of the streams that were made without cudaStreamNonBlocking,
// and those come after its own (CUDA runtime API, "Stream synchronization behavior").
void CudaMachine::join_legacy_streams(Lock& lock, CudaStream& stream) {
  if (blocking_streams_ == 0) return;
  CudaStream& legacy = *defaults_[static_cast<size_t>(stream.device)];
  const auto wait_for_all_of = [&](CudaStream& other) { wait_for(lock, stream, position_of(other)); };
  if (&stream != &legacy) {
    if ((stream.flags & kNonBlocking) == 0) wait_for_all_of(legacy);
    return;
  }
  for (CudaStream* other : streams_of(stream.device)) {
    if (other != &legacy && (other->flags & kNonBlocking) == 0) wait_for_all_of(*other);
  }
}

// Everything that is enqueued on a stream now.
RecordingPtr CudaMachine::position_of(CudaStream& stream) {
  auto recording = std::make_shared<CudaRecording>();
  recording->stream = &stream;
  recording->position = stream.enqueued;
  recording->seen = stream.clock.snapshot();
  return recording;
}

RecordingPtr CudaMachine::record(Lock& lock, CudaStream& stream, bool timed) {
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
  StreamOperation operation;
  operation.kind = StreamOperation::Kind::kRecord;
  operation.name = "cudaEventRecord";
  if (timed) operation.recording = recording;
  push(lock, stream, std::move(operation));
  return recording;
}

void CudaMachine::wait_for(Lock& lock, CudaStream& stream, const RecordingPtr& recording) {
  stream.clock.join(recording->seen);
  if (stopped_ || recording->stream == &stream || recording->reached()) return;
  make_context(stream.device, "cudaStreamWaitEvent");
  StreamOperation operation;
  operation.kind = StreamOperation::Kind::kWait;
  operation.name = "cudaStreamWaitEvent";
  operation.recording = recording;
  push(lock, stream, std::move(operation));
}

bool CudaMachine::query(const CudaRecording& recording) {
  if (!recording.reached()) return false;
  races.host_saw(recording);
  return true;
}

bool CudaMachine::query(CudaStream& stream) {
  if (stream.completed < stream.enqueued) return false;
  races.host_saw(stream);
  return true;
}

void CudaMachine::synchronize_device(Lock& lock, int device) {
  std::vector<std::pair<CudaStream*, uint64_t>> wanted;
  for (CudaStream* stream : streams_of(device)) wanted.emplace_back(stream, stream->enqueued);
  for (const auto& [stream, position] : wanted) {
    synchronize(lock, *stream, position);
    races.host_saw(*stream);
  }
}

// ---- controls of tests

GatePtr CudaMachine::hold(Lock& lock, CudaStream& stream) {
  auto gate = std::make_shared<Gate>();
  StreamOperation operation;
  operation.kind = StreamOperation::Kind::kHold;
  operation.name = "hold";
  operation.gate = gate;
  enqueue(lock, stream, std::move(operation));
  return gate;
}

void CudaMachine::open(Gate& gate) {
  gate.is_open = true;
  wake();
}

void CudaMachine::break_device(int new_error) {
  if (error == 0) error = new_error;
  wake();
}

bool CudaMachine::takes_a_failure() {
  if (failing_allocations == 0) return false;
  --failing_allocations;
  return true;
}

void CudaMachine::wake() {
  if (synchronising_ > 0) changed_.notify_all();
  if (runner_sleeps_) due_.notify_one();
}

void CudaMachine::stop(Lock& lock) {
  if (std::exchange(stopped_, true)) return;
  error = cudaErrorCudartUnloading;
  changed_.notify_all();
  due_.notify_all();
  host_function_.notify_all();
  // The caller may destroy the memory of running kernels, so they finish first. A host function may never return.
  const auto runs_kernel = [](const CudaStream* stream) {
    return stream->running && stream->queue.front().kind != StreamOperation::Kind::kHostFunction;
  };
  while (std::any_of(busy_.begin(), busy_.end(), runs_kernel)) changed_.wait_for(lock, std::chrono::milliseconds(1));
}

}  // namespace fakecuda
