#include "machine/machine.h"

#include <driver_types.h>
#include <execinfo.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

namespace fakecuda {
namespace {

constexpr auto kAttemptInterval = std::chrono::milliseconds(1);
constexpr unsigned kNonBlocking = cudaStreamNonBlocking;

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

Machine::Machine() : settings(Settings::of_environment()) {
  random_ = settings.seed * 2654435761u + 88172645463325252u;
  races.enabled = settings.detect_races;
  memory.start(settings.devices, settings.memory);
  has_context_.resize(static_cast<size_t>(settings.devices));
  for (int device = 0; device < settings.devices; ++device) defaults_.push_back(make_stream(device, 0, 0));
  blocking_streams_ = 0;
  counters.streams_created = 0;
  // A child of fork() has none of the threads, and CUDA refuses to work there (cudaErrorInitializationError).
  pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                 [] {
                   get().error = cudaErrorInitializationError;
                   get().mutex.unlock();
                 });
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
  if (reinterpret_cast<uintptr_t>(handle) <= 2) return defaults_.at(static_cast<size_t>(device));  // cudaStreamLegacy...
  auto* const stream = static_cast<Stream*>(const_cast<void*>(handle));
  return streams_.count(stream) != 0 ? stream : nullptr;
}

Stream* Machine::make_stream(int device, unsigned flags, int priority) {
  auto* const stream = new Stream;
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  const uint64_t number = counters.streams_created++;
  const std::string name = defaults_.size() < static_cast<size_t>(settings.devices) ? "the default stream"
                                                                                    : "stream " + std::to_string(number);
  stream->agent = races.add_agent(name + " of cuda:" + std::to_string(device));
  streams_.insert(stream);
  if ((flags & kNonBlocking) == 0) ++blocking_streams_;
  return stream;
}

// CUDA runtime API, cudaStreamDestroy: work in the stream is still done.
void Machine::destroy_stream(Stream* stream) {
  streams_.erase(stream);
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
  for (const Stream* stream : streams_) {
    if (stream->device == device) found.push_back(const_cast<Stream*>(stream));
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
  if (takes_part_in_races(operation.kind)) races.enqueue(stream, operation.accesses, operation.site);
  if (blocking_streams_ > 0 && operation.kind != Operation::Kind::kWait) join_legacy_streams(lock, stream);
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
  Stream& legacy = *defaults_[static_cast<size_t>(stream.device)];
  const auto wait_for_all_of = [&](Stream& other) {
    if (other.completed < other.enqueued) wait_for(lock, stream, record(lock, other, false));
  };
  if (&stream != &legacy) {
    if ((stream.flags & kNonBlocking) == 0) wait_for_all_of(legacy);
    return;
  }
  for (Stream* other : streams_of(stream.device)) {
    if (other != &legacy && (other->flags & kNonBlocking) == 0) wait_for_all_of(*other);
  }
}

RecordingPtr Machine::record(Lock& lock, Stream& stream, bool timed) {
  auto recording = std::make_shared<Recording>();
  recording->stream = &stream;
  recording->clock = races.snapshot(stream);
  recording->capture = stream.capture;
  if (stream.capture != nullptr) {
    stream.capture->advance(&stream);
    const auto& before = stream.capture->follows[&stream];
    recording->follows.assign(before.begin(), before.end());
    return recording;
  }
  recording->position = stream.enqueued + 1;
  Operation operation;
  operation.kind = Operation::Kind::kRecord;
  operation.name = "cudaEventRecord";
  if (timed) operation.recording = recording;
  enqueue(lock, stream, std::move(operation));
  recording->position = stream.enqueued;  // after what enqueue() put before it
  return recording;
}

void Machine::wait_for(Lock& lock, Stream& stream, const RecordingPtr& recording) {
  races.join(stream, *recording);
  if (recording->stream == &stream || recording->reached()) return;
  Operation operation;
  operation.kind = Operation::Kind::kWait;
  operation.name = "cudaStreamWaitEvent";
  operation.recording = recording;
  enqueue(lock, stream, std::move(operation));
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

// Runs the streams that `stream` waits for too, each up to the position that matters.
void Machine::synchronize(Lock& lock, Stream& stream, uint64_t position) {
  std::vector<std::pair<Stream*, uint64_t>> wanted{{&stream, position}};
  while (!wanted.empty() && !stopped_) {
    auto [last, until] = wanted.back();
    if (last->completed >= until) {
      wanted.pop_back();
    } else if (last->running) {
      ++synchronising_;
      changed_.wait(lock);
      --synchronising_;
    } else if (const Operation& front = last->queue.front();
               front.kind == Operation::Kind::kWait && !front.recording->reached() && error == 0) {
      wanted.emplace_back(front.recording->stream, front.recording->position);
    } else if (!step(lock, *last) && !last->running && !last->queue.empty()) {
      wait_for_change(lock, last->queue.front());
    }
  }
}

void Machine::wait_for_change(Lock& lock, const Operation& front) {
  ++synchronising_;
  if (front.kind == Operation::Kind::kSleep) {
    changed_.wait_until(lock, front.begun + front.duration);
  } else if (front.kind == Operation::Kind::kAttempt) {
    changed_.wait_for(lock, kAttemptInterval);
  } else {
    changed_.wait(lock);
  }
  --synchronising_;
}

void Machine::synchronize_device(Lock& lock, int device) {
  std::vector<std::pair<Stream*, uint64_t>> wanted;
  for (Stream* stream : streams_of(device)) wanted.emplace_back(stream, stream->enqueued);
  for (const auto& [stream, position] : wanted) {
    synchronize(lock, *stream, position);
    races.host_saw(*stream);
  }
}

// ---- running

// Run the front of a stream, if it may run now. Return whether the stream has advanced.
bool Machine::step(Lock& lock, Stream& stream) {
  Operation& front = stream.queue.front();
  const bool is_broken = error != 0;  // then nothing runs any more, and nothing is waited for
  switch (front.kind) {
    case Operation::Kind::kWork:
      run_unlocked(lock, stream);
      break;
    case Operation::Kind::kAttempt:
      if (!attempt_unlocked(lock, stream)) return false;
      break;
    case Operation::Kind::kHostFunction:
      host_function_.notify_one();
      return false;
    case Operation::Kind::kRecord:
      if (front.recording != nullptr) front.recording->time = Clock::now();
      break;
    case Operation::Kind::kWait:
      if (!front.recording->reached() && !is_broken) return false;
      break;
    case Operation::Kind::kSleep:
      if (front.begun == Clock::time_point{}) front.begun = Clock::now();
      if (Clock::now() < front.begun + front.duration && !is_broken) return false;
      break;
    case Operation::Kind::kHold:
      if (!front.gate->is_open && !is_broken) return false;
      break;
  }
  finish_front(stream);
  return true;
}

void Machine::run_unlocked(Lock& lock, Stream& stream) {
  Operation& front = stream.queue.front();
  auto run = std::move(front.run);
  const char* const name = front.name;
  const bool is_broken = error != 0;
  stream.running = true;
  lock.unlock();
  std::string failure;
  try {
    if (!is_broken) run();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  run = nullptr;
  lock.lock();
  stream.running = false;
  if (failure.empty()) return;
  fprintf(stderr, "fakecuda: the kernel %s failed: %s\n", name, failure.c_str());
  break_device(cudaErrorAssert);
}

bool Machine::attempt_unlocked(Lock& lock, Stream& stream) {
  if (error != 0) return true;
  Operation& front = stream.queue.front();
  stream.running = true;
  lock.unlock();
  const bool is_done = front.attempt();
  lock.lock();
  stream.running = false;
  if (!is_done && synchronising_ > 0) changed_.notify_all();  // a thread may have waited for `running`
  return is_done;
}

void Machine::finish_front(Stream& stream) {
  stream.queue.pop_front();
  ++stream.completed;
  if (stream.queue.empty()) {
    stream.busy = false;
    busy_.erase(std::find(busy_.begin(), busy_.end(), &stream));
  }
  if (synchronising_ > 0) changed_.notify_all();
  if (runner_sleeps_) due_.notify_one();  // another stream may have waited for this
}

// Run what is due in a stream. Return when the runner thread should look at it again: at the end of time where something
// else has to happen first, which wakes the runner.
Clock::time_point Machine::run_due_of(Lock& lock, Stream& stream, bool& has_advanced) {
  while (!stream.running && !stream.queue.empty()) {
    const auto now = Clock::now();
    if (stream.queue.front().due > now) return stream.queue.front().due;
    if (step(lock, stream)) {
      has_advanced = true;
    } else if (!stream.running && !stream.queue.empty()) {
      const Operation& front = stream.queue.front();
      if (front.kind == Operation::Kind::kSleep) return front.begun + front.duration;
      return front.kind == Operation::Kind::kAttempt ? now + kAttemptInterval : Clock::time_point::max();
    }
  }
  return Clock::time_point::max();
}

// The runner thread.
void Machine::run_due() {
  pthread_setname_np(pthread_self(), "fakecuda");
  Lock lock(mutex);
  while (!stopped_) {
    bool has_advanced = false;
    auto next = Clock::time_point::max();
    const std::vector<Stream*> busy = busy_;
    for (Stream* stream : busy) next = std::min(next, run_due_of(lock, *stream, has_advanced));
    if (has_advanced) continue;
    runner_sleeps_ = true;
    runner_sleeps_until_ = next;
    if (next == Clock::time_point::max()) {
      due_.wait(lock);
    } else {
      due_.wait_until(lock, next);
    }
    runner_sleeps_ = false;
    runner_sleeps_until_ = Clock::time_point{};
  }
}

// Host functions run on a thread of their own: one that blocks holds up its stream and no other.
void Machine::run_host_functions() {
  pthread_setname_np(pthread_self(), "fakecuda-host");
  Lock lock(mutex);
  while (!stopped_) {
    const auto is_ready = [](const Stream* stream) {
      return !stream->running && stream->queue.front().kind == Operation::Kind::kHostFunction;
    };
    const auto found = std::find_if(busy_.begin(), busy_.end(), is_ready);
    if (found == busy_.end()) {
      host_function_.wait(lock);
      continue;
    }
    Stream& stream = **found;
    run_unlocked(lock, stream);
    finish_front(stream);
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

void Machine::stop() {
  stopped_ = true;
  error = cudaErrorCudartUnloading;
  changed_.notify_all();
  due_.notify_all();
  host_function_.notify_all();
}

}  // namespace fakecuda
