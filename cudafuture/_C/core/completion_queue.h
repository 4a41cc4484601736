// The continuations that a thread has yet to run; each thread has one queue.
//
// A future that is completed inside a callback does not run its callbacks there. They are queued, and the outermost
// completion in the thread runs them. A chain of any length therefore completes in constant stack.
#pragma once

#include "core/continuation.h"

namespace cudafuture {

class CompletionQueue {
 public:
  static CompletionQueue& current() noexcept;

  // Passes each continuation of `list` (linked by next) to its executor; `parent` is done.
  static void dispatch(Future& parent, Continuation* list) noexcept;

  bool empty() const noexcept { return queue_.empty(); }
  bool draining() const noexcept { return depth_ > 0; }
  // A callback in help() may run another that calls help(). This is the depth limit, because stacks are finite.
  bool is_deepest() const noexcept { return depth_ >= kMaxDepth; }

  // Runs queued continuations until `awaited` is done or the queue is empty. A callback calls this when it waits for a
  // future whose own callbacks are behind it in this thread's queue; without it, the wait would never end. Must not be
  // called at the maximum depth.
  void help(const Future& awaited) noexcept;

  void push(Continuation* c) noexcept { queue_.push(c); }
  // Runs continuations until the queue is empty; may be nested in a callback. `is_inside`: this thread is inside the
  // interpreter.
  void drain(bool is_inside) noexcept;

 private:
  void run_one() noexcept;

  static constexpr int kMaxDepth = 64;

  ContinuationList queue_;
  int depth_ = 0;
  bool is_inside_ = false;  // true if the innermost drain runs inside the interpreter
};

}  // namespace cudafuture
