// Where continuations run.
#pragma once

#include "core/continuation.h"

namespace cudafuture {

class OrderedExecutor;

// Takes continuations whose parent is done and runs them later, in the order in which they came.
class Executor {
 public:
  virtual ~Executor() = default;
  // `c->parent` is set. May be called by any thread, with no lock of the core held.
  virtual void post(Continuation* c) noexcept = 0;
  // Called by the thread that attaches `c`, before anybody can post it. One that keeps an order of its own gives it a
  // place here, and is told by leave() when it is dropped instead of posted.
  virtual void enrol(Continuation&) noexcept {}
  virtual void leave(Continuation&) noexcept {}
  virtual OrderedExecutor* ordered() noexcept { return nullptr; }
};

// Runs a continuation in the thread that completes the future, through that thread's queue; one that needs the
// embedding language runs on the callback thread when the completing thread is outside the interpreter.
class InlineExecutor final : public Executor {
 public:
  static InlineExecutor& get() noexcept;
  void post(Continuation* c) noexcept override;
};

}  // namespace cudafuture
