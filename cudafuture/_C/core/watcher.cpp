#include "core/watcher.h"

#include <pthread.h>

#include <algorithm>
#include <unordered_map>

#include "core/completion_queue.h"
#include "core/future.h"
#include "core/process.h"

namespace cudafuture {

Watcher& Watcher::get() noexcept {
  static auto* watcher = new Watcher;  // leaked: engines may post until the very end of the process
  return *watcher;
}

void Watcher::watch(Continuation* c) noexcept {
  if (is_forked_child()) return;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    inbox_.push_back(c);
    ++statistics_.watched;
    ++statistics_.pending;
    if (!thread_.joinable()) {
      mark_used();
      thread_ = std::thread([this] { loop(); });
    }
  }
  wake_.notify_one();
}

void Watcher::set_pauses(std::chrono::microseconds first, std::chrono::microseconds longest) noexcept {
  std::lock_guard lock(mutex_);
  first_pause_ = first;
  longest_pause_ = std::max(first, longest);
}

Watcher::Statistics Watcher::statistics() const noexcept {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void Watcher::loop() noexcept {
  pthread_setname_np(pthread_self(), "cudafuture-poll");
  std::vector<Continuation*> watched;
  std::unique_lock lock(mutex_);
  std::chrono::microseconds pause = first_pause_;
  for (;;) {
    if (watched.empty()) {
      wake_.wait(lock, [this] { return stopping_ || !inbox_.empty(); });
    } else {
      wake_.wait_for(lock, pause, [this] { return stopping_ || !inbox_.empty(); });
    }
    if (stopping_) return;
    if (!inbox_.empty()) pause = first_pause_;
    watched.insert(watched.end(), inbox_.begin(), inbox_.end());
    inbox_.clear();
    lock.unlock();

    // Each future is asked once in a round: its callbacks keep their order when its device finishes between two looks.
    std::unordered_map<const Future*, bool> finished;
    const auto is_due = [&](Continuation* c) {
      const auto [known, first] = finished.try_emplace(c->parent.get());
      if (first) known->second = c->parent->device_work_finished();
      return known->second;
    };
    const auto due = std::stable_partition(watched.begin(), watched.end(), [&](auto* c) { return !is_due(c); });
    const std::vector<Continuation*> ready(due, watched.end());
    watched.erase(due, watched.end());
    for (Continuation* c : ready) {
      FuturePtr parent = c->parent;
      CompletionQueue::dispatch(*parent, c);
    }

    lock.lock();
    ++statistics_.polls;
    statistics_.pending -= ready.size();
    pause = ready.empty() ? std::min(pause * 2, longest_pause_) : first_pause_;
  }
}

void Watcher::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace cudafuture
