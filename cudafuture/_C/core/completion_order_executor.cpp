#include "core/completion_order_executor.h"

#include "core/process.h"

namespace cudafuture {

void CompletionOrderExecutor::post(Continuation* c) noexcept {
  if (is_forked_child()) return;  // the thread that holds the lock may not exist in the child
  queue_.enrol(*c);
  c->executor = this;  // its order is not attachment order, which is the same on every rank
  queue_.post(c);
}

}  // namespace cudafuture
