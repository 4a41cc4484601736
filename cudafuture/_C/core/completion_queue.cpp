#include "core/completion_queue.h"

#include "core/callback_thread.h"
#include "core/edge.h"
#include "core/executor.h"
#include "core/future.h"
#include "core/watcher.h"

namespace cudafuture {
namespace {

thread_local constinit CompletionQueue queue_of_thread;

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
      // Those behind one that is watched are watched too, lest they overtake it.
      watching = watching || (stands(Edge::then_when_ready) && !parent.device_work_finished());
      if (watching) {
        Watcher::get().watch(c);
        continue;
      }
    }
    const bool is_foreign = (c->flags & Continuation::foreign) != 0;
    if (c->executor != nullptr && c->executor != &InlineExecutor::get()) {
      c->executor->post(c);
    } else if (is_foreign && !inside) {
      CallbackThread::get().post(c);
    } else {
      queue.push(c);
    }
  }
  if (!queue.draining()) queue.drain();
}

void CompletionQueue::run_one() noexcept {
  Continuation* c = queue_.pop();
  FuturePtr parent = std::move(c->parent);
  c->run(*parent);
}

void CompletionQueue::drain() noexcept {
  ++depth_;
  while (!queue_.empty()) run_one();
  --depth_;
}

void CompletionQueue::help(const Future& awaited) noexcept {
  if (is_deepest()) return;
  ++depth_;
  while (!awaited.done() && !queue_.empty()) run_one();
  --depth_;
}

}  // namespace cudafuture
