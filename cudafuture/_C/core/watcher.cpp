#include "core/watcher.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <system_error>
#include <unordered_map>

#include "core/callback_thread.h"
#include "core/completion_queue.h"
#include "core/ending.h"
#include "core/error.h"
#include "core/future.h"
#include "core/process.h"

namespace cudafuture {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned long kTimerSlack = 1000;  // nanoseconds; the usual 50 us would lengthen every short pause

void abandon_watched(const std::vector<Continuation*>& list) noexcept {
  ContinuationList doomed;
  for (Continuation* c : list) doomed.push(c);
  if (!doomed.empty()) CallbackThread::get().post_abandon(doomed.take_all());
}

}  // namespace

Watcher& Watcher::get() noexcept {
  static auto* watcher = new Watcher;  // leaked: engines may post until the end of the process
  return *watcher;
}

// A continuation that comes too late is abandoned if possible, so that no caller waits for it; otherwise it is leaked.
void Watcher::watch(Continuation* c) noexcept {
  if (is_forked_child()) return;
  const Run run = put(c);
  if (run == Run::begun) return;
  if (run == Run::no_thread) c->refuse(std::make_exception_ptr(no_thread("watching devices")));
  if (foreign_runtime().inside()) {
    c->abandon();
  } else if (run == Run::no_thread) {
    CallbackThread::get().post_abandon(c);
  } else {
    CallbackThread::get().lose();
  }
}

bool Watcher::try_watch(Continuation* c) noexcept { return put(c) == Run::begun; }

Watcher::Run Watcher::put(Continuation* c) noexcept {
  std::lock_guard lock(mutex_);
  if (const Run run = start_locked(); run != Run::begun) return run;
  inbox_.push_back(c);
  ++statistics_.watched;
  ++statistics_.pending;
  wake_.notify_one();
  return Run::begun;
}

Watcher::Run Watcher::start_locked() noexcept {
  if (stopping_) return Run::stopped;
  if (thread_.joinable()) return Run::begun;
  mark_used();
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error&) {
    return Run::no_thread;
  }
  return Run::begun;
}

void Watcher::require() {
  if (is_forked_child()) return;
  std::lock_guard lock(mutex_);
  if (start_locked() == Run::no_thread) throw no_thread("watching devices");
}

void Watcher::set_pauses(std::chrono::microseconds first, std::chrono::microseconds longest) noexcept {
  std::lock_guard lock(mutex_);
  backoff_ = Backoff(first, longest);
}

Watcher::Statistics Watcher::statistics() const noexcept {
  std::lock_guard lock(mutex_);
  return statistics_;
}

// Sleeps until there is a new continuation, the next poll is due, or the process shuts down.
void Watcher::sleep(std::unique_lock<std::mutex>& lock, bool is_watching) noexcept {
  const auto is_called = [this] { return stopping_ || !inbox_.empty(); };
  const auto due = is_watching ? Clock::now() + backoff_.next() : Clock::time_point();
  while (!is_called() && (!is_watching || Clock::now() < due)) {
    if (is_watching) {
      wake_.wait_until(lock, due);
    } else {
      wake_.wait(lock);
    }
    ++statistics_.wakeups;
  }
}

// Takes out the continuations whose device work has finished. Each future is queried once per round, so its callbacks
// keep their order when its device finishes between two queries.
Watcher::List Watcher::take_due(List& watched) noexcept {
  std::unordered_map<const Future*, bool> finished;
  const auto is_due = [&](Continuation* c) {
    const auto [known, first] = finished.try_emplace(c->parent.get());
    if (first) known->second = c->parent->device_work_finished();
    return known->second;
  };
  const auto due = std::stable_partition(watched.begin(), watched.end(), [&](auto* c) { return !is_due(c); });
  List taken(due, watched.end());
  watched.erase(due, watched.end());
  return taken;
}

void Watcher::loop() noexcept {
  pthread_setname_np(pthread_self(), "cudafuture-poll");
  prctl(PR_SET_TIMERSLACK, kTimerSlack);
  List watched;
  std::unique_lock lock(mutex_);
  for (bool last = false; !last;) {
    sleep(lock, !watched.empty());
    last = stopping_;
    if (!inbox_.empty()) backoff_.reset();
    watched.insert(watched.end(), inbox_.begin(), inbox_.end());
    inbox_.clear();
    if (watched.empty()) continue;
    lock.unlock();

    const List due = take_due(watched);
    for (Continuation* c : due) {
      FuturePtr parent = c->parent;
      CompletionQueue::dispatch(*parent, c);
    }
    if (last) abandon_watched(watched);

    lock.lock();
    ++statistics_.polls;
    statistics_.pending -= last ? due.size() + watched.size() : due.size();
    if (!due.empty()) backoff_.reset();
  }
  ended_ = true;
  end_.notify_all();
}

void Watcher::stop(bool (*go_on)() noexcept) noexcept {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    wake_.notify_all();
    if (!thread_.joinable()) return;
    if (!wait_for_end(lock, end_, go_on, [this] { return ended_; })) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

}  // namespace cudafuture
