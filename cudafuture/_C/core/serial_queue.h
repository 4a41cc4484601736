// A serial queue: continuations run one after another in attachment order. The order in which their parents complete
// differs between ranks.
//
//     attach ──► a place at the end of the queue
//     post   ──► ready;  the head of the queue, if ready, runs;  the others wait behind it
//     leave  ──► the place is removed: the continuation was detached or dropped
//
// A serial queue has a thread while one of its continuations can run, so a continuation may block.
// SerialQueue::current() separates the attachments and operations of its callbacks from those that the program makes
// concurrently.
//
// A serial queue may take part in the order of issue. Each of its callbacks then has a position there until it has run.
//
// Lock: mutex_ guards the queue; under it, enrol() takes the lock of the order of issue, and no other lock is taken.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "core/executor.h"
#include "core/issue_order.h"
#include "core/thread_cache.h"

namespace cudafuture {

class SerialQueue final : public Executor, private ThreadCache::Task {
 public:
  enum class Order {
    attachment,
    issue,       // attachment order, and the callbacks take part in the order of issue
    completion,  // continuations get their places when they are posted; current() does not return this queue
  };

  explicit SerialQueue(std::string name, Order order = Order::attachment) : name_(std::move(name)), order_(order) {}

  static SerialQueue* current() noexcept;  // the serial queue whose callback this thread runs; null: none
  const std::string& name() const noexcept { return name_; }

  void enrol(Continuation& c) noexcept override;
  void leave(Continuation& c) noexcept override;
  void post(Continuation* c) noexcept override;

  std::size_t length() const noexcept;  // number of continuations in the queue

 private:
  struct Place {
    Continuation* ready = nullptr;
    bool left = false;
    IssueOrder::Position position{};  // empty: no part in the order of issue
  };

  template <class Change>
  void change(Change&& change) noexcept;
  void abandon_ready() noexcept;
  void refuse_ready() noexcept;
  bool head_is_ready() noexcept;
  Continuation* take_head(IssueOrder::Position& position) noexcept;
  Continuation* take_head() noexcept;
  void run(Continuation* c, const IssueOrder::Position& position) noexcept;
  void perform() noexcept override;
  const char* thread_name() const noexcept override { return "cudafuture-sq"; }

  const std::string name_;
  const Order order_;
  mutable std::mutex mutex_;
  std::deque<Place> places_;
  std::uint64_t first_ = 1;  // the number of the head's place; 0 is no place
  bool running_ = false;     // a thread is in take_head() or about to call it
};

}  // namespace cudafuture
