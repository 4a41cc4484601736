#include "core/serial_queue.h"

#include <utility>

#include "core/callback_thread.h"
#include "core/completion_queue.h"
#include "core/error.h"
#include "core/future.h"
#include "core/process.h"
#include "core/reaper.h"

namespace cudafuture {
namespace {

[[gnu::tls_model("initial-exec")]] thread_local SerialQueue* serial_queue_of_thread = nullptr;

}  // namespace

SerialQueue* SerialQueue::current() noexcept { return serial_queue_of_thread; }

void SerialQueue::enrol(Continuation& c) noexcept {
  if (is_forked_child()) return;
  Place place;
  std::lock_guard lock(mutex_);  // positions rise along the queue, so the order's own lock is taken under this one
  if (order_ == Order::issue) place.position = IssueOrder::get().enter();
  c.executor = this;
  c.place = first_ + places_.size();
  places_.push_back(std::move(place));
}

// Changes the queue, and starts a thread if the change made its head ready.
template <class Change>
void SerialQueue::change(Change&& change) noexcept {
  {
    std::lock_guard lock(mutex_);
    change();
    if (running_ || !head_is_ready()) return;
    running_ = true;
  }
  switch (ThreadCache::get().run(this)) {
    case ThreadCache::Run::begun:
      break;
    case ThreadCache::Run::no_thread:
      refuse_ready();
      break;
    case ThreadCache::Run::stopped:
      abandon_ready();
      break;
  }
}

// Fails the ready callbacks, because no thread could be started to run them. Later callbacks can run.
void SerialQueue::refuse_ready() noexcept {
  const std::exception_ptr error = std::make_exception_ptr(no_thread("the callbacks of '" + name_ + "'"));
  ContinuationList refused;
  while (Continuation* ready = take_head()) {
    ready->refuse(error);
    refused.push(ready);
  }
  if (refused.empty()) return;
  if (foreign_runtime().inside()) {
    reap_continuations(refused.take_all());
  } else {
    CallbackThread::get().post_abandon(refused.take_all());
  }
}

// Abandons the ready continuations at shutdown, when no more threads start. Outside the interpreter they cannot be
// abandoned: they stay for the next thread that calls this inside.
void SerialQueue::abandon_ready() noexcept {
  if (foreign_runtime().inside()) {
    while (Continuation* ready = take_head()) ready->abandon();
    return;
  }
  CallbackThread::get().lose();
  std::lock_guard lock(mutex_);
  running_ = false;
}

void SerialQueue::leave(Continuation& c) noexcept {
  const std::uint64_t place = std::exchange(c.place, 0);
  if (is_forked_child()) return;
  IssueOrder::Position position;
  change([&] {
    places_[place - first_].left = true;
    position = std::move(places_[place - first_].position);
  });
  if (!position.empty()) IssueOrder::get().leave(position);
}

void SerialQueue::post(Continuation* c) noexcept {
  if (is_forked_child()) return;
  change([&] { places_[c->place - first_].ready = c; });
}

bool SerialQueue::head_is_ready() noexcept {
  while (!places_.empty() && places_.front().left) {
    places_.pop_front();
    ++first_;
  }
  return !places_.empty() && places_.front().ready != nullptr;
}

Continuation* SerialQueue::take_head(IssueOrder::Position& position) noexcept {
  std::lock_guard lock(mutex_);
  if (!head_is_ready()) {
    running_ = false;
    return nullptr;
  }
  Continuation* const c = places_.front().ready;
  position = std::move(places_.front().position);
  places_.pop_front();
  ++first_;
  c->place = 0;
  return c;
}

// Takes the head of the queue, a callback that will not run.
Continuation* SerialQueue::take_head() noexcept {
  IssueOrder::Position position;
  Continuation* const c = take_head(position);
  if (!position.empty()) IssueOrder::get().leave(position);
  return c;
}

std::size_t SerialQueue::length() const noexcept {
  std::lock_guard lock(mutex_);
  return places_.size();
}

void SerialQueue::perform() noexcept {
  const ForeignRuntime& runtime = foreign_runtime();
  if (!runtime.enter()) return;  // the interpreter is gone: leak the queue
  serial_queue_of_thread = order_ == Order::completion ? nullptr : this;
  IssueOrder::Position position;
  while (Continuation* c = take_head(position)) {
    run(c, position);
    position.clear();
  }
  serial_queue_of_thread = nullptr;
  runtime.leave();
}

void SerialQueue::run(Continuation* c, const IssueOrder::Position& position) noexcept {
  CompletionQueue& queue = CompletionQueue::current();
  {
    const IssueOrder::Running running(position);
    queue.push(c);
    queue.drain(true);
  }
  if (!position.empty()) IssueOrder::get().leave(position);
}

}  // namespace cudafuture
