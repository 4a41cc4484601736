#include "core/lane.h"

#include <utility>

#include "core/callback_thread.h"
#include "core/completion_queue.h"
#include "core/future.h"
#include "core/process.h"

namespace cudafuture {
namespace {

thread_local Lane* lane_of_thread = nullptr;

}  // namespace

Lane* Lane::current() noexcept { return lane_of_thread; }

void Lane::enrol(Continuation& c) noexcept {
  if (is_forked_child()) return;
  std::lock_guard lock(mutex_);
  c.executor = this;
  c.place = first_ + line_.size();
  line_.emplace_back();
}

// Changes the line, and has a thread come if that made its head ready.
template <class Change>
void Lane::change(Change&& change) noexcept {
  {
    std::lock_guard lock(mutex_);
    change();
    if (running_ || !head_is_ready()) return;
    running_ = true;
  }
  if (!ThreadCache::get().run(this)) give_up();
}

// The process is going away, and no thread comes any more. What is ready is told where that can be done; elsewhere it
// stays, for the next one who comes inside.
void Lane::give_up() noexcept {
  if (foreign_runtime().inside()) {
    while (Continuation* ready = take_head()) ready->abandon();
    return;
  }
  CallbackThread::get().lose();
  std::lock_guard lock(mutex_);
  running_ = false;
}

void Lane::leave(Continuation& c) noexcept {
  const std::uint64_t place = std::exchange(c.place, 0);
  if (is_forked_child()) return;
  change([&] { line_[place - first_].left = true; });
}

void Lane::post(Continuation* c) noexcept {
  if (is_forked_child()) return;
  change([&] { line_[c->place - first_].ready = c; });
}

bool Lane::head_is_ready() noexcept {
  while (!line_.empty() && line_.front().left) {
    line_.pop_front();
    ++first_;
  }
  return !line_.empty() && line_.front().ready != nullptr;
}

Continuation* Lane::take_head() noexcept {
  std::lock_guard lock(mutex_);
  if (!head_is_ready()) {
    running_ = false;
    return nullptr;
  }
  Continuation* const c = line_.front().ready;
  line_.pop_front();
  ++first_;
  c->place = 0;
  return c;
}

std::size_t Lane::length() const noexcept {
  std::lock_guard lock(mutex_);
  return line_.size();
}

void Lane::perform() noexcept {
  const ForeignRuntime& runtime = foreign_runtime();
  if (!runtime.enter()) return;  // the interpreter is gone: leak what stands in the line
  lane_of_thread = this;
  CompletionQueue& queue = CompletionQueue::current();
  while (Continuation* c = take_head()) {
    queue.push(c);
    queue.drain();
  }
  lane_of_thread = nullptr;
  runtime.leave();
}

}  // namespace cudafuture
