#include "core/completion_queue.h"

#include <utility>

#include "core/callback_thread.h"
#include "core/executor.h"
#include "core/future.h"
#include "core/sync_edge.h"
#include "core/watcher.h"

namespace cudafuture {
namespace {

thread_local constinit CompletionQueue queue_of_thread;

// Lets the future that waits for another thread say so.
void note_dispatch(const Continuation& c) noexcept {
  if (Future* const dependent = c.dependent()) dependent->set_dispatched();
}

}  // namespace

CompletionQueue& CompletionQueue::current() noexcept { return queue_of_thread; }

void CompletionQueue::dispatch(Future& parent, Continuation* list) noexcept {
  CompletionQueue& queue = current();
  const bool inside = foreign_runtime().inside();
  bool watching = false;
  while (list != nullptr) {
    Continuation* c = list;
    list = c->next;
    c->next = nullptr;
    c->parent = FuturePtr::unsafe_reclaim_from_nonowning(&parent);
    if ((c->flags & Continuation::when_ready) != 0) {
      c->flags &= static_cast<std::uint8_t>(~Continuation::when_ready);
      if (parent.events().is_captured()) c->flags |= Continuation::unwatchable;
      // Continuations behind a watched one are watched too, so that they cannot overtake it.
      watching = watching || (stands(SyncEdge::then_when_ready) && !parent.device_work_finished());
      if (watching) {
        Watcher::get().watch(c);
        continue;
      }
    }
    const bool is_foreign = (c->flags & Continuation::foreign) != 0;
    if (c->executor != nullptr && c->executor != &InlineExecutor::get()) {
      note_dispatch(*c);
      c->executor->post(c);
    } else if (is_foreign && !inside) {
      note_dispatch(*c);
      CallbackThread::get().post(c);
    } else {
      queue.push(c);
    }
  }
  if (!queue.draining()) queue.drain(inside);
}

// A continuation can enter the interpreter for a moment, complete a future there, and leave again. The callbacks of
// that future are then in the queue of a thread outside the interpreter: they run on the callback thread.
void CompletionQueue::run_one() noexcept {
  Continuation* c = queue_.pop();
  if (!is_inside_ && (c->flags & Continuation::foreign) != 0) {
    CallbackThread::get().post(c);
    return;
  }
  FuturePtr parent = std::move(c->parent);
  c->run(*parent);
}

void CompletionQueue::drain(bool is_inside) noexcept {
  const bool was_inside = std::exchange(is_inside_, is_inside);
  ++depth_;
  while (!queue_.empty()) run_one();
  --depth_;
  is_inside_ = was_inside;
}

void CompletionQueue::help(const Future& awaited) noexcept {
  if (is_deepest()) return;
  const bool was_inside = std::exchange(is_inside_, true);
  ++depth_;
  while (!awaited.done() && !queue_.empty()) run_one();
  --depth_;
  is_inside_ = was_inside;
}

}  // namespace cudafuture
