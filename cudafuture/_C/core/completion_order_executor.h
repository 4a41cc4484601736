// An executor with its own thread: the callbacks that name it run one at a time, in the order in which their futures
// complete. Callbacks elsewhere do not delay them, and they delay no others.
//
// It is a serial queue in which a callback gets its place when its future completes, instead of when it is attached.
#pragma once

#include <string>

#include "core/executor.h"
#include "core/process.h"
#include "core/serial_queue.h"

namespace cudafuture {

class CompletionOrderExecutor final : public Executor {
 public:
  // Creates an executor that is never freed, like every serial queue: futures and callbacks may refer to it until the
  // process ends.
  static CompletionOrderExecutor& make(std::string name) { return *new CompletionOrderExecutor(std::move(name)); }

  void post(Continuation* c) noexcept override {
    if (is_forked_child()) return;  // the thread that holds the lock may not exist in the child
    queue_.enrol(*c);
    c->executor = this;  // its order is not attachment order, which is the same on every rank
    queue_.post(c);
  }
  void leave(Continuation& c) noexcept override { queue_.leave(c); }

 private:
  explicit CompletionOrderExecutor(std::string name) : queue_(std::move(name), SerialQueue::Order::completion) {}

  SerialQueue queue_;
};

}  // namespace cudafuture
