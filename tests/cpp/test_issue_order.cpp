// The order in which a program and its callbacks issue operations, and which of them must wait.
#include <string>
#include <utility>
#include <vector>

#include "core/issue_order.h"
#include "core/ordered_executor.h"
#include "rules.h"
#include "serial_queues.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

IssueOrder& order() { return IssueOrder::get(); }

bool may_issue() { return order().wait_until(IssueOrder::Clock::now()); }

void wait_to_issue() { CHECK(order().wait_until(IssueOrder::Clock::now() + std::chrono::minutes(1))); }

bool may_issue_at(const IssueOrder::Position& position) {
  const IssueOrder::Running running(position);
  return may_issue();
}

// Return the executor of a new group that takes part in the order of issue. Executors of groups are never freed.
OrderedExecutor& new_ring() {
  static auto* const rings = new std::vector<OrderedExecutor*>;
  return *rings->emplace_back(&OrderedExecutor::make("ring", true));
}

}  // namespace

TEST_SUITE_BEGIN("issue_order");

TEST_CASE_FIXTURE(Rules, "the program may issue when no callback is pending") {
  CHECK(may_issue());
  const IssueOrder::Position first = order().enter();
  const IssueOrder::Position second = order().enter();
  CHECK_FALSE(may_issue());
  order().leave(second);
  CHECK_FALSE(may_issue());
  order().leave(first);
  CHECK(may_issue());
}

TEST_CASE_FIXTURE(Rules, "a callback may issue after all callbacks attached before it") {
  const IssueOrder::Position first = order().enter();
  const IssueOrder::Position second = order().enter();
  CHECK(may_issue_at(first));
  CHECK_FALSE(may_issue_at(second));
  order().leave(first);
  CHECK(may_issue_at(second));
  order().leave(second);
}

TEST_CASE_FIXTURE(Rules, "a callback waits for its own attachments, and not vice versa") {
  const IssueOrder::Position outer = order().enter();
  const IssueOrder::Position behind = order().enter();
  IssueOrder::Position inner;
  {
    const IssueOrder::Running running(outer);
    inner = order().enter();
    CHECK_FALSE(may_issue());
  }
  CHECK(may_issue_at(inner));
  CHECK_FALSE(may_issue_at(behind));
  order().leave(outer);
  CHECK_FALSE(may_issue_at(behind));
  order().leave(inner);
  CHECK(may_issue_at(behind));
  order().leave(behind);
}

TEST_CASE_FIXTURE(Rules, "callbacks that a callback attaches issue in attachment order") {
  const IssueOrder::Position outer = order().enter();
  const IssueOrder::Running running(outer);
  const IssueOrder::Position first = order().enter();
  const IssueOrder::Position second = order().enter();
  CHECK(first < second);
  CHECK(may_issue_at(first));
  CHECK_FALSE(may_issue_at(second));
  order().leave(first);
  CHECK(may_issue_at(second));
  order().leave(second);
  order().leave(outer);
}

TEST_CASE_FIXTURE(Rules, "callbacks attached without a position have none") {
  const IssueOrder::Position none;
  const IssueOrder::Running running(none);
  CHECK(order().enter().empty());
  CHECK(may_issue());
}

TEST_CASE_FIXTURE(Rules, "callbacks of several serial queues issue in attachment order") {
  for (int round = 0; round < 20; ++round) {
    OrderedExecutor& group = new_ring();
    OrderedExecutor& other = new_ring();
    Order issued;
    Executor* const executors[] = {&group, &group.deeper(), &other, &group.deeper(), &group};
    std::vector<FuturePtr> parents;
    int number = 0;
    for (Executor* executor : executors) {
      parents.push_back(pending());
      parents.back()->attach(call_inside(
          [&issued, mine = number++](Future&) {
            void* const state = foreign_runtime().step_out();
            wait_to_issue();
            foreign_runtime().step_in(state);
            issued.push_back(mine);
          },
          executor));
    }
    for (std::size_t i = parents.size(); i-- > 0;) parents[i]->complete({});  // in reverse order
    wait_to_issue();
    CHECK(issued == Order{0, 1, 2, 3, 4});
  }
}

TEST_CASE_FIXTURE(Rules, "a callback that is dropped loses its position") {
  OrderedExecutor& group = new_ring();
  FuturePtr parent = pending();
  Callback* const callback = call_inside([](Future&) {}, &group);
  parent->attach(callback);
  CHECK_FALSE(may_issue());
  parent.reset();
  settle_callback_thread();
  CHECK(may_issue());
}

TEST_CASE_FIXTURE(Rules, "callbacks of unordered executors delay no other") {
  static OrderedExecutor& beside = OrderedExecutor::make("beside");
  FuturePtr parent = pending();
  Signal ran;
  parent->attach(call_inside([&](Future&) { ran.send(); }, &beside));
  CHECK(may_issue());
  parent->complete({});
  ran.wait();
}

TEST_SUITE_END();
