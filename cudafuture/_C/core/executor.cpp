#include "core/executor.h"

#include "core/callback_thread.h"
#include "core/completion_queue.h"

namespace cudafuture {

InlineExecutor& InlineExecutor::get() noexcept {
  static auto* executor = new InlineExecutor;
  return *executor;
}

void InlineExecutor::post(Continuation* c) noexcept {
  const bool inside = foreign_runtime().inside();
  if ((c->flags & Continuation::foreign) != 0 && !inside) {
    CallbackThread::get().post(c);
    return;
  }
  CompletionQueue& queue = CompletionQueue::current();
  queue.push(c);
  if (!queue.draining()) queue.drain(inside);
}

}  // namespace cudafuture
