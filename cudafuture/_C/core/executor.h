// The interface through which continuations are run.
#pragma once

#include "core/continuation.h"

namespace cudafuture {

class OrderedExecutor;

// Takes continuations whose parent is done and runs them later, in the order of the posts.
class Executor {
 public:
  virtual ~Executor() = default;
  // Takes `c`, whose `c->parent` is set. Any thread may call it, with no lock of the core held.
  virtual void post(Continuation* c) noexcept = 0;
  // Called by the thread that attaches `c`, before any thread can post it. An executor that keeps its own order assigns
  // a place here. leave() tells it that the continuation is dropped instead of posted.
  virtual void enrol(Continuation&) noexcept {}
  virtual void leave(Continuation&) noexcept {}
  virtual OrderedExecutor* ordered() noexcept { return nullptr; }
};

// Runs a continuation in the thread that completes the future, through that thread's queue. A foreign continuation runs
// on the callback thread if the completing thread is outside the interpreter.
class InlineExecutor final : public Executor {
 public:
  static InlineExecutor& get() noexcept;
  void post(Continuation* c) noexcept override;
};

}  // namespace cudafuture
