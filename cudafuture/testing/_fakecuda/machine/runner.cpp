// Execution of operations: in a thread that synchronises, in the runner thread, or in the thread of host functions.
#include <driver_types.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "machine/machine.h"

namespace fakecuda {
namespace {

constexpr auto kAttemptInterval = std::chrono::milliseconds(1);

}  // namespace

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
    draining_.erase(&stream);
    busy_.erase(std::find(busy_.begin(), busy_.end(), &stream));
  }
  if (synchronising_ > 0) changed_.notify_all();
  if (runner_sleeps_) due_.notify_one();  // another stream may have waited for this
}

// Run what is due in a stream. Return when the runner thread should look at it again: at the end of time where
// something else has to happen first, which wakes the runner.
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

}  // namespace fakecuda
