// Which serial queue a callback goes to: one for each attacher and each depth.
#include <string>
#include <vector>

#include "core/ordered_executor.h"
#include "rules.h"
#include "serial_queues.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

using Names = std::vector<std::string>;

// Never freed, as no executor of a group is.
OrderedExecutor& new_group(const std::string& name = "group") {
  static auto* const all = new std::vector<OrderedExecutor*>;
  return *all->emplace_back(&OrderedExecutor::make(name));
}

// Says in which serial queue it runs.
Callback* say_queue(Names& names, Executor& executor, Signal* said = nullptr) {
  return call_inside(
      [&names, said](Future&) {
        names.push_back(SerialQueue::current()->name());
        if (said != nullptr) said->send();
      },
      &executor);
}

}  // namespace

TEST_SUITE_BEGIN("ordered_executor");

TEST_CASE_FIXTURE(Rules, "each depth is one object, which knows its name and its queues") {
  OrderedExecutor& group = new_group("ring");
  OrderedExecutor& deeper = group.deeper();
  OrderedExecutor& deepest = deeper.deeper();
  CHECK(group.depth() == 0);
  CHECK(deeper.depth() == 1);
  CHECK(deepest.depth() == 2);
  CHECK(&group.deeper() == &deeper);
  CHECK(&group.deeper().deeper() == &deepest);
  CHECK(deepest.name() == "ring");
  CHECK(group.shares_queues_with(deepest));
  CHECK(deepest.shares_queues_with(group));
  CHECK_FALSE(group.shares_queues_with(new_group("ring")));
}

TEST_CASE_FIXTURE(Rules, "threads that ask at once get the same object of a depth") {
  for (int round = 0; round < 50; ++round) {
    OrderedExecutor& group = new_group();
    std::vector<OrderedExecutor*> seen(4);
    together(4, [&](int i) { seen[static_cast<std::size_t>(i)] = &group.deeper().deeper(); });
    for (const OrderedExecutor* one : seen) CHECK(one == &group.deeper().deeper());
  }
}

TEST_CASE_FIXTURE(Rules, "a future tells whether its executor is ordered") {
  OrderedExecutor& group = new_group();
  const FuturePtr future = pending();
  CHECK(future->ordered_executor() == nullptr);
  future->set_default_executor(&InlineExecutor::get());
  CHECK(future->ordered_executor() == nullptr);
  future->set_default_executor(&group);
  CHECK(future->ordered_executor() == &group);
  CHECK(new_serial_queue().ordered() == nullptr);
}

TEST_CASE_FIXTURE(Rules, "what the program attaches goes to the serial queue of the depth") {
  OrderedExecutor& group = new_group();
  Names names;
  completed()->attach(say_queue(names, group));
  settle(group);
  completed()->attach(say_queue(names, group.deeper()));
  settle(group.deeper());
  completed()->attach(say_queue(names, group));
  settle(group);
  CHECK(names == Names{"group.0", "group.1", "group.0"});
}

TEST_CASE_FIXTURE(Rules, "what a serial queue attaches goes to a serial queue of its own, by the group and the depth") {
  OrderedExecutor& group = new_group();
  OrderedExecutor& other = new_group("other");
  Names names;
  const auto attached_in_queue_to = [&](Executor& executor) {
    Signal said;
    completed()->attach(call_inside([&](Future& self) { self.attach(say_queue(names, executor, &said)); }, &group));
    said.wait();
  };
  attached_in_queue_to(group);
  attached_in_queue_to(group.deeper());
  attached_in_queue_to(other);
  attached_in_queue_to(group);
  CHECK(names == Names{"group.0>group.0", "group.0>group.1", "group.0>other.0", "group.0>group.0"});
}

TEST_CASE_FIXTURE(Rules, "a serial queue that a serial queue's callbacks attach to attaches to one further on") {
  OrderedExecutor& group = new_group();
  Names names;
  Signal said;
  const auto twice_inside = [&](Future& self) { self.attach(say_queue(names, group.deeper(), &said)); };
  completed()->attach(call_inside([&](Future& self) { self.attach(call_inside(twice_inside, &group)); }, &group));
  said.wait();
  CHECK(names == Names{"group.0>group.0>group.1"});
}

TEST_CASE_FIXTURE(Rules, "any thread that runs no serial queue's callback counts as the program") {
  OrderedExecutor& group = new_group();
  const FuturePtr first = pending();
  Order order;
  first->attach(call_inside(mark(order, 1), &group));
  std::thread([&] { completed()->attach(call_inside(mark(order, 2), &group)); }).join();
  first->complete({});
  settle(group);
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "what a serial queue attaches and what the program attaches do not wait for each other") {
  OrderedExecutor& group = new_group();
  const FuturePtr of_queue = pending();
  const FuturePtr of_program = pending();
  Order order;
  Signal attached;
  Signal ran_in_queue;
  completed()->attach(call_inside(
      [&](Future&) {
        of_queue->attach(call_inside(
            [&](Future&) {
              order.push_back(2);
              ran_in_queue.send();
            },
            &group));
        attached.send();
      },
      &group));
  attached.wait();
  SUBCASE("the program's runs though the serial queue's is held up") {
    completed()->attach(call_inside(mark(order, 1), &group));
    settle(group);
    of_queue->complete({});
    ran_in_queue.wait();
    CHECK(order == Order{1, 2});
  }
  SUBCASE("the serial queue's runs though the program's is held up") {
    of_program->attach(call_inside(mark(order, 1), &group));
    of_queue->complete({});
    ran_in_queue.wait();
    of_program->complete({});
    settle(group);
    CHECK(order == Order{2, 1});
  }
}

TEST_CASE_FIXTURE(Rules, "the second step of a chain does not hold up the first step of the next") {
  OrderedExecutor& group = new_group();
  const FuturePtr issued = completed();
  const FuturePtr results[2] = {pending(), pending()};  // of the first steps: complete only once both have run
  Order order;
  for (int chain = 0; chain < 2; ++chain) {
    issued->attach(call_inside(
        [&, chain](Future&) {
          order.push_back(10 + chain);
          if (chain == 0) return;
          results[1]->complete({});
          results[0]->complete({});
        },
        &group));
    results[chain]->attach(call_inside(mark(order, 20 + chain), &group.deeper()));
  }
  settle(group);
  settle(group.deeper());
  CHECK(order == Order{10, 11, 20, 21});
}

TEST_CASE_FIXTURE(Rules, "every serial queue runs the same callbacks in the same order, whatever completes first") {
  constexpr int kFutures = 20;
  for (unsigned seed = 0; seed < 8; ++seed) {
    OrderedExecutor& group = new_group();
    std::vector<FuturePtr> parents;
    for (int i = 0; i < kFutures; ++i) parents.push_back(pending());
    Names names;
    Order of_program;
    Order of_queue;
    Signal last;
    for (int i = 0; i < kFutures; ++i) {
      // Each attaches one more, to a future that may be done by then or not.
      const FuturePtr other = parents[static_cast<std::size_t>(kFutures - 1 - i)];
      parents[static_cast<std::size_t>(i)]->attach(call_inside(
          [&, i, other](Future&) {
            of_program.push_back(i);
            other->attach(call_inside(
                [&, i](Future&) {
                  of_queue.push_back(i);
                  if (i == kFutures - 1) last.send();
                },
                &group));
          },
          &group));
    }
    for (int i = 0; i < kFutures; ++i) {
      parents[(static_cast<std::size_t>(i) * (2 * seed + 1)) % kFutures]->complete({});
    }
    for (const FuturePtr& parent : parents) parent->complete({});
    last.wait();
    Order all;
    for (int i = 0; i < kFutures; ++i) all.push_back(i);
    CHECK(of_program == all);
    CHECK(of_queue == all);
  }
}

TEST_CASE_FIXTURE(Rules, "a callback that is posted without a place goes to the end of the line") {
  OrderedExecutor& group = new_group();
  const FuturePtr first = pending();
  Order order;
  first->attach(call_inside(mark(order, 1), &group));
  Callback* const posted = call_inside(mark(order, 2), &group);
  posted->parent = completed();
  group.post(posted);
  first->complete({});
  settle(group);
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "a forked child gives no places, asks for no lock and runs nothing") {
  OrderedExecutor& group = new_group();
  settle(group);
  static int ran = 0;
  CHECK(in_forked_child([&] {
    completed()->attach(call_inside([](Future&) { ++ran; }, &group));
    return ran == 0;
  }));
}

TEST_SUITE_END();
