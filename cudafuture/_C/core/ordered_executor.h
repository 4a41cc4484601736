// An executor that runs the callbacks of one group's futures in the same order on every rank, whatever completes first.
//
// Each rank runs the same program, so it attaches the same callbacks in the same order. Callbacks therefore run in
// attachment order, in serial queues. A queue has one attacher, the program or another queue, because concurrent
// attachers have no order between them. Each result of a then_async() is one step deeper than its parent and has its
// own queue: otherwise the second step of one chain would delay the first step of the next.
//
//     attached by      to the result of a call      to the result of a then_async()
//     the program      queue "group.0"              queue "group.1"
//     queue "group.0"  queue "group.0>group.0"      queue "group.0>group.1"
//
// By induction over the attachers, every queue runs the same callbacks in the same order on every rank. If only one
// queue issues collectives on a group, they are issued in the same order.
#pragma once

#include <memory>
#include <string>

#include "core/executor.h"
#include "core/serial_queue.h"

namespace cudafuture {

class OrderedExecutor final : public Executor {
 public:
  // Creates an executor that is never freed, like its queues: futures and callbacks may refer to it until the process
  // ends. `in_issue_order`: its callbacks take part in the order of issue.
  static OrderedExecutor& make(std::string name, bool in_issue_order = false);

  // Puts the continuation into the serial queue of the calling thread.
  void enrol(Continuation& c) noexcept override;
  void post(Continuation* c) noexcept override;
  OrderedExecutor* ordered() noexcept override { return this; }

  OrderedExecutor& deeper();
  int depth() const noexcept { return depth_; }
  const std::string& name() const noexcept;
  bool shares_queues_with(const OrderedExecutor& other) const noexcept { return shared_ == other.shared_; }

 private:
  struct Shared;

  OrderedExecutor(std::shared_ptr<Shared> shared, int depth) noexcept : shared_(std::move(shared)), depth_(depth) {}
  SerialQueue& queue_of_thread() noexcept;

  std::shared_ptr<Shared> shared_;
  int depth_;
};

}  // namespace cudafuture
