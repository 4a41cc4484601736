// Runs continuations one after the other, in the order in which they were attached: not in that in which their parents
// were completed, which is another one on every rank.
//
//     attach ──► a place at the end of the line
//     post   ──► ready;  the head of the line, if ready, runs;  others wait behind it
//     leave  ──► the place is given up: the continuation was taken back or dropped
//
// A lane has a thread while something in it can run, so what runs there may block. Its callbacks run inside the lane:
// Lane::current() tells what they attach and issue from what the program does beside them.
//
// A lane may take part in the order of issue: each of its callbacks then has a position there until it has run.
//
// Lock: mutex_ guards the line; nothing is taken under it.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "core/executor.h"
#include "core/issue_order.h"
#include "core/thread_cache.h"

namespace cudafuture {

class Lane final : public Executor, private ThreadCache::Task {
 public:
  enum class Order {
    attachment,
    issue,       // that of attachment, and its callbacks take part in the order of issue
    completion,  // continuations get their places when they are posted; for the order of collectives it is no lane
  };

  explicit Lane(std::string name, Order order = Order::attachment) : name_(std::move(name)), order_(order) {}

  static Lane* current() noexcept;  // whose callback this thread runs; null: none
  const std::string& name() const noexcept { return name_; }

  void enrol(Continuation& c) noexcept override;
  void leave(Continuation& c) noexcept override;
  void post(Continuation* c) noexcept override;

  std::size_t length() const noexcept;  // how many stand in the line

 private:
  struct Place {
    Continuation* ready = nullptr;
    bool left = false;
    IssueOrder::Position position{};  // empty: it takes no part
  };

  template <class Change>
  void change(Change&& change) noexcept;
  void give_up() noexcept;
  void refuse_ready() noexcept;
  bool head_is_ready() noexcept;
  Continuation* take_head(IssueOrder::Position& position) noexcept;
  Continuation* take_head() noexcept;
  void run(Continuation* c, const IssueOrder::Position& position) noexcept;
  void perform() noexcept override;

  const std::string name_;
  const Order order_;
  mutable std::mutex mutex_;
  std::deque<Place> line_;
  std::uint64_t first_ = 1;  // the number of the head's place; 0 is no place
  bool running_ = false;     // a thread is in take_head() or will come
};

}  // namespace cudafuture
