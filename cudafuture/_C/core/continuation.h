// A link in the list of actions that a future runs when it is done.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <exception>

#include "core/foreign.h"

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

// A first-in-first-out list that owns nothing and never allocates memory.
class ContinuationList {
 public:
  bool empty() const noexcept { return head_ == nullptr; }
  Continuation* head() const noexcept { return head_; }

  void push(Continuation* c) noexcept {
    c->next = nullptr;
    (tail_ == nullptr ? head_ : tail_->next) = c;
    tail_ = c;
  }

  Continuation* pop() noexcept {
    Continuation* c = head_;
    if (c == nullptr) return nullptr;
    head_ = c->next;
    if (head_ == nullptr) tail_ = nullptr;
    c->next = nullptr;
    return c;
  }

  Continuation* take_all() noexcept {
    Continuation* list = head_;
    head_ = tail_ = nullptr;
    return list;
  }

  // Moves all continuations that match the predicate into `taken`; returns the number that stay.
  template <class Predicate>
  std::size_t take_if(Predicate&& predicate, ContinuationList& taken) {
    ContinuationList stay;
    std::size_t count = 0;
    while (Continuation* c = pop()) {
      if (predicate(*c)) {
        taken.push(c);
      } else {
        stay.push(c);
        ++count;
      }
    }
    *this = stay;
    return count;
  }

  // Removes and returns the first continuation that matches the predicate, or returns null.
  template <class Predicate>
  Continuation* remove_if(Predicate&& predicate) {
    Continuation* before = nullptr;
    for (Continuation* c = head_; c != nullptr; before = c, c = c->next) {
      if (!predicate(*c)) continue;
      (before == nullptr ? head_ : before->next) = c->next;
      if (tail_ == c) tail_ = before;
      c->next = nullptr;
      return c;
    }
    return nullptr;
  }

 private:
  Continuation* head_ = nullptr;
  Continuation* tail_ = nullptr;
};

}  // namespace cudafuture
