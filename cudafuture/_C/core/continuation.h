// A link in the list of actions that a future runs when it is done.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <exception>

#include "core/foreign.h"
#include "core/intrusive_list.h"

namespace cudafuture {

class Executor;
class Future;
using FuturePtr = c10::intrusive_ptr<Future>;

class Continuation {
 public:
  enum Flags : std::uint8_t {
    none = 0,
    foreign = 1,      // runs code of the embedding language: never on a thread outside the interpreter
    when_ready = 2,   // runs when the device work behind the parent's events has finished, not when the parent is done
    unwatchable = 4,  // was meant to be when_ready, but the host cannot query the parent's events
  };

  explicit Continuation(std::uint8_t flags = none, Executor* executor = nullptr) noexcept;
  Continuation(const Continuation&) = delete;
  Continuation& operator=(const Continuation&) = delete;

  // Exactly one of these two is called, once, as the last call: it ends the continuation's ownership of itself.
  virtual void run(Future& parent) noexcept = 0;
  virtual void abandon() noexcept = 0;  // the parent was dropped while pending, or the process is shutting down

  // Fails the future that run() would complete, because no thread could be started to run it; abandon() follows. Any
  // thread may call this. False: no caller waits for this continuation.
  virtual bool refuse(const std::exception_ptr&) noexcept { return false; }

  // Returns true if run() would have no effect any more. Called under the parent's lock.
  virtual bool is_moot() const noexcept { return false; }

  // The future that run() completes; null: none, or several. Called under the parent's lock, which keeps it alive.
  virtual Future* dependent() const noexcept { return nullptr; }

  // Visits the foreign references that this continuation owns.
  virtual int visit(ForeignVisitor) const { return 0; }

  Continuation* next = nullptr;  // in the parent's list, then in a queue
  FuturePtr parent;              // set while the continuation is queued
  Executor* executor;            // runs the continuation; null: the thread that completes the future
  std::uint64_t place = 0;       // in the queue of an executor that keeps an order; 0: none
  std::uint8_t flags;

 protected:
  virtual ~Continuation();
};

using ContinuationList = IntrusiveList<Continuation>;

}  // namespace cudafuture
