#include "core/thread_cache.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "core/capture.h"
#include "core/ending.h"
#include "core/foreign.h"
#include "core/process.h"

namespace cudafuture {
namespace {

constexpr std::size_t kMostIdle = 8;

thread_local std::atomic<bool>* leavable_here = nullptr;

}  // namespace

ThreadCache& ThreadCache::get() noexcept {
  static auto* cache = new ThreadCache;  // leaked: tasks may arrive until the end of the process
  return *cache;
}

ThreadCache::Run ThreadCache::run(Task* task) noexcept {
  if (is_forked_child()) return Run::stopped;  // the lock may be held by a thread that does not exist in the child
  std::lock_guard lock(mutex_);
  if (stopping_) return Run::stopped;
  if (!idle_.empty()) {
    Worker* const worker = idle_.back();
    idle_.pop_back();
    worker->task = task;
    worker->wake.notify_one();
    return Run::begun;
  }
  join_ended();
  mark_used();
  const auto self = workers_.emplace(workers_.end());
  self->task = task;
  try {
    self->thread = std::thread([this, self] { loop(self); });
  } catch (const std::system_error&) {
    workers_.erase(self);
    return Run::no_thread;
  }
  return Run::begun;
}

bool ThreadCache::is_current() noexcept { return leavable_here != nullptr; }

void ThreadCache::set_leavable(bool leavable) noexcept {
  if (leavable_here != nullptr) leavable_here->store(leavable, std::memory_order_relaxed);
}

void ThreadCache::loop(Workers::iterator self) noexcept {
  leavable_here = &self->leavable;
  mark_library_thread();
  std::unique_lock lock(mutex_);
  for (;;) {
    self->wake.wait(lock, [&] { return stopping_ || self->task != nullptr; });
    Task* const task = std::exchange(self->task, nullptr);
    if (task == nullptr) break;
    lock.unlock();
    pthread_setname_np(pthread_self(), task->thread_name());
    task->perform();
    self->leavable.store(false, std::memory_order_relaxed);  // that was about this task
    pthread_setname_np(pthread_self(), "cudafuture-idle");
    lock.lock();
    if (stopping_ || idle_.size() >= kMostIdle) break;
    idle_.push_back(&*self);
  }
  lock.unlock();
  foreign_runtime().retire();
  lock.lock();
  self->ended = true;
  ended_.notify_all();
}

bool ThreadCache::may_leave() const noexcept {
  return std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.ended || w.leavable; });
}

// Detaches the running threads. Their nodes are leaked with the cache.
void ThreadCache::leave_others() noexcept {
  for (Worker& worker : workers_) {
    if (!worker.ended && worker.thread.joinable()) worker.thread.detach();
  }
}

// Joins the threads that have only to return.
void ThreadCache::join_ended() noexcept {
  workers_.remove_if([](Worker& worker) {
    if (worker.ended && worker.thread.joinable()) worker.thread.join();  // not a thread that stop() left running
    return worker.ended;
  });
}

void ThreadCache::stop(bool (*go_on)() noexcept) noexcept {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  for (Worker* worker : idle_) worker->wake.notify_one();
  idle_.clear();
  const bool all_may_leave = wait_for_end(lock, ended_, go_on, [this] { return may_leave(); });
  leave_others();
  if (all_may_leave) join_ended();
}

}  // namespace cudafuture
