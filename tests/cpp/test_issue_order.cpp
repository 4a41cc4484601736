// The order in which a program and its callbacks issue: whose turn it is, and who waits.
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

bool is_turn() { return order().wait_until(IssueOrder::Clock::now()); }

void await_turn() { CHECK(order().wait_until(IssueOrder::Clock::now() + std::chrono::minutes(1))); }

bool is_turn_of(const IssueOrder::Position& position) {
  const IssueOrder::Running running(position);
  return is_turn();
}

// Never freed, as no executor of a group is.
OrderedExecutor& new_ring() {
  static auto* const all = new std::vector<OrderedExecutor*>;
  return *all->emplace_back(&OrderedExecutor::make("ring", true));
}

}  // namespace

TEST_SUITE_BEGIN("issue_order");

TEST_CASE_FIXTURE(Rules, "the program's turn comes when no callback is pending") {
  CHECK(is_turn());
  const IssueOrder::Position first = order().enter();
  const IssueOrder::Position second = order().enter();
  CHECK_FALSE(is_turn());
  order().leave(second);
  CHECK_FALSE(is_turn());
  order().leave(first);
  CHECK(is_turn());
}

TEST_CASE_FIXTURE(Rules, "a callback's turn comes when those that were attached before it have run") {
  const IssueOrder::Position first = order().enter();
  const IssueOrder::Position second = order().enter();
  CHECK(is_turn_of(first));
  CHECK_FALSE(is_turn_of(second));
  order().leave(first);
  CHECK(is_turn_of(second));
  order().leave(second);
}

TEST_CASE_FIXTURE(Rules, "a callback waits for those that it has attached, which do not wait for it") {
  const IssueOrder::Position outer = order().enter();
  const IssueOrder::Position behind = order().enter();
  IssueOrder::Position inner;
  {
    const IssueOrder::Running running(outer);
    inner = order().enter();
    CHECK_FALSE(is_turn());
  }
  CHECK(is_turn_of(inner));
  CHECK_FALSE(is_turn_of(behind));
  order().leave(outer);
  CHECK_FALSE(is_turn_of(behind));
  order().leave(inner);
  CHECK(is_turn_of(behind));
  order().leave(behind);
}

TEST_CASE_FIXTURE(Rules, "what a callback attaches later comes later") {
  const IssueOrder::Position outer = order().enter();
  const IssueOrder::Running running(outer);
  const IssueOrder::Position first = order().enter();
  const IssueOrder::Position second = order().enter();
  CHECK(first < second);
  CHECK(is_turn_of(first));
  CHECK_FALSE(is_turn_of(second));
  order().leave(first);
  CHECK(is_turn_of(second));
  order().leave(second);
  order().leave(outer);
}

TEST_CASE_FIXTURE(Rules, "a callback without a position gives none to what it attaches") {
  const IssueOrder::Position none;
  const IssueOrder::Running running(none);
  CHECK(order().enter().empty());
  CHECK(is_turn());
}

TEST_CASE_FIXTURE(Rules, "callbacks of several serial queues issue in the order of their attachment") {
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
            await_turn();
            foreign_runtime().step_in(state);
            issued.push_back(mine);
          },
          executor));
    }
    for (std::size_t i = parents.size(); i-- > 0;) parents[i]->complete({});  // the last one first
    await_turn();
    CHECK(issued == Order{0, 1, 2, 3, 4});
  }
}

TEST_CASE_FIXTURE(Rules, "a callback that is dropped gives up its position") {
  OrderedExecutor& group = new_ring();
  FuturePtr parent = pending();
  Callback* const callback = call_inside([](Future&) {}, &group);
  parent->attach(callback);
  CHECK_FALSE(is_turn());
  parent.reset();
  settle_callback_thread();
  CHECK(is_turn());
}

TEST_CASE_FIXTURE(Rules, "executors that take no part hold nobody up") {
  static OrderedExecutor& beside = OrderedExecutor::make("beside");
  FuturePtr parent = pending();
  Signal ran;
  parent->attach(call_inside([&](Future&) { ran.send(); }, &beside));
  CHECK(is_turn());
  parent->complete({});
  ran.wait();
}

TEST_SUITE_END();
