// The continuations that this thread has to run, one queue per thread.
//
// Completing a future inside a callback does not run its callbacks there: they wait their turn here, and the outermost
// completion in the thread runs them. So a chain of any length completes in constant stack.
#pragma once

#include "core/continuation.h"

namespace cudafuture {

class CompletionQueue {
 public:
  static CompletionQueue& current() noexcept;

  // Hands each continuation of `list` (linked by next) to where it runs; `parent` is done.
  static void dispatch(Future& parent, Continuation* list) noexcept;

  bool empty() const noexcept { return queue_.empty(); }
  bool draining() const noexcept { return depth_ > 0; }
  // A callback that helps may run one that helps. At this depth nobody may any more: stacks are finite.
  bool is_deepest() const noexcept { return depth_ >= kMaxDepth; }

  // Runs what stands in the queue until `awaited` is done or the queue is empty. For a callback that waits for a future
  // whose own callbacks stand behind it in this thread's queue: without this it would wait for ever. Not at the
  // deepest.
  void help(const Future& awaited) noexcept;

  void push(Continuation* c) noexcept { queue_.push(c); }
  // Until it is empty; nested in a callback where one is running. `is_inside`: this thread is inside the interpreter.
  void drain(bool is_inside) noexcept;

 private:
  void run_one() noexcept;

  static constexpr int kMaxDepth = 64;

  ContinuationList queue_;
  int depth_ = 0;
  bool is_inside_ = false;  // true if the innermost drain runs inside the interpreter
};

}  // namespace cudafuture
