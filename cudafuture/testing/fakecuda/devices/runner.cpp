// Execution of operations: in a thread that synchronises, in the runner thread, or in the thread of host functions.
#include <driver_types.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "fakecuda/devices/machine.h"

namespace fakecuda {
namespace {

constexpr auto kAttemptInterval = std::chrono::milliseconds(1);

}  // namespace

// Runs the streams that `stream` waits for too, each up to the position that matters.
void CudaMachine::synchronize(Lock& lock, CudaStream& stream, uint64_t position) {
  std::vector<std::pair<CudaStream*, uint64_t>> wanted{{&stream, position}};
  while (!wanted.empty() && !stopped_) {
    auto [last, until] = wanted.back();
    if (last->completed >= until) {
      wanted.pop_back();
    } else if (last->running) {
      ++synchronising_;
      changed_.wait(lock);
      --synchronising_;
    } else if (const StreamOperation& front = last->queue.front();
               front.kind == StreamOperation::Kind::kWait && !front.recording->reached() && error == 0) {
      wanted.emplace_back(front.recording->stream, front.recording->position);
    } else if (!step(lock, *last) && !last->running && !last->queue.empty()) {
      wait_for_change(lock, last->queue.front());
    }
  }
}

void CudaMachine::wait_for_change(Lock& lock, const StreamOperation& front) {
  ++synchronising_;
  if (front.kind == StreamOperation::Kind::kSleep) {
    changed_.wait_until(lock, front.begun + front.duration);
  } else if (front.kind == StreamOperation::Kind::kAttempt) {
    changed_.wait_for(lock, kAttemptInterval);
  } else {
    changed_.wait(lock);
  }
  --synchronising_;
}

// Run the front of a stream, if it may run now. Return whether the stream has advanced.
bool CudaMachine::step(Lock& lock, CudaStream& stream) {
  StreamOperation& front = stream.queue.front();
  const bool is_broken = error != 0;  // then nothing runs any more, and nothing is waited for
  switch (front.kind) {
    case StreamOperation::Kind::kWork:
      run_unlocked(lock, stream);
      break;
    case StreamOperation::Kind::kAttempt:
      if (!attempt_unlocked(lock, stream)) return false;
      break;
    case StreamOperation::Kind::kHostFunction:
      host_function_.notify_one();
      return false;
    case StreamOperation::Kind::kRecord:
      if (front.recording != nullptr) front.recording->time = Clock::now();
      break;
    case StreamOperation::Kind::kWait:
      if (!front.recording->reached() && !is_broken) return false;
      break;
    case StreamOperation::Kind::kSleep:
      if (front.begun == Clock::time_point{}) front.begun = Clock::now();
      if (Clock::now() < front.begun + front.duration && !is_broken) return false;
      break;
    case StreamOperation::Kind::kHold:
      if (!front.gate->is_open && !is_broken) return false;
      break;
  }
  finish_front(stream);
  return true;
}

void CudaMachine::run_unlocked(Lock& lock, CudaStream& stream) {
  StreamOperation& front = stream.queue.front();
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

bool CudaMachine::attempt_unlocked(Lock& lock, CudaStream& stream) {
  if (error != 0) return true;
  StreamOperation& front = stream.queue.front();
  stream.running = true;
  lock.unlock();
  const bool is_done = front.attempt();
  lock.lock();
  stream.running = false;
  if (!is_done && synchronising_ > 0) changed_.notify_all();  // a thread may have waited for `running`
  return is_done;
}

void CudaMachine::finish_front(CudaStream& stream) {
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
Clock::time_point CudaMachine::run_due_of(Lock& lock, CudaStream& stream, bool& has_advanced) {
  while (!stream.running && !stream.queue.empty()) {
    const auto now = Clock::now();
    if (stream.queue.front().due > now) return stream.queue.front().due;
    if (step(lock, stream)) {
      has_advanced = true;
    } else if (!stream.running && !stream.queue.empty()) {
      const StreamOperation& front = stream.queue.front();
      if (front.kind == StreamOperation::Kind::kSleep) return front.begun + front.duration;
      return front.kind == StreamOperation::Kind::kAttempt ? now + kAttemptInterval : Clock::time_point::max();
    }
  }
  return Clock::time_point::max();
}

// The runner thread.
void CudaMachine::run_due() {
  pthread_setname_np(pthread_self(), "fakecuda");
  Lock lock(mutex);
  while (!stopped_) {
    bool has_advanced = false;
    auto next = Clock::time_point::max();
    const std::vector<CudaStream*> busy = busy_;
    for (CudaStream* stream : busy) next = std::min(next, run_due_of(lock, *stream, has_advanced));
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
void CudaMachine::run_host_functions() {
  pthread_setname_np(pthread_self(), "fakecuda-host");
  Lock lock(mutex);
  while (!stopped_) {
    const auto is_ready = [](const CudaStream* stream) {
      return !stream->running && stream->queue.front().kind == StreamOperation::Kind::kHostFunction;
    };
    const auto found = std::find_if(busy_.begin(), busy_.end(), is_ready);
    if (found == busy_.end()) {
      host_function_.wait(lock);
      continue;
    }
    CudaStream& stream = **found;
    run_unlocked(lock, stream);
    finish_front(stream);
  }
}

}  // namespace fakecuda
