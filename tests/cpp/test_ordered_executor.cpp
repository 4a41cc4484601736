// OrderedExecutor: it has one serial queue for each attacher and each depth.
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

// Return the executor of a new group. Executors of groups are never freed.
OrderedExecutor& new_group(const std::string& name = "group") {
  static auto* const groups = new std::vector<OrderedExecutor*>;
  return *groups->emplace_back(&OrderedExecutor::make(name));
}

// Return a callback that appends the name of its serial queue to `names`.
Callback* record_queue(Names& names, Executor& executor, Signal* recorded = nullptr) {
  return call_inside(
      [&names, recorded](Future&) {
        names.push_back(SerialQueue::current()->name());
        if (recorded != nullptr) recorded->send();
      },
      &executor);
}

}  // namespace

TEST_SUITE_BEGIN("ordered_executor");

TEST_CASE_FIXTURE(Rules, "each depth is one object, with the group's name and queues") {
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

TEST_CASE_FIXTURE(Rules, "concurrent requests for a depth return the same object") {
  for (int round = 0; round < 50; ++round) {
    OrderedExecutor& group = new_group();
    std::vector<OrderedExecutor*> seen(4);
    together(4, [&](int i) { seen[static_cast<std::size_t>(i)] = &group.deeper().deeper(); });
    for (const OrderedExecutor* executor : seen) CHECK(executor == &group.deeper().deeper());
  }
}

TEST_CASE_FIXTURE(Rules, "a future returns its default executor if that is an ordered one") {
  OrderedExecutor& group = new_group();
  const FuturePtr future = pending();
  CHECK(future->ordered_executor() == nullptr);
  future->set_default_executor(&InlineExecutor::get());
  CHECK(future->ordered_executor() == nullptr);
  future->set_default_executor(&group);
  CHECK(future->ordered_executor() == &group);
  CHECK(new_serial_queue().ordered() == nullptr);
}

TEST_CASE_FIXTURE(Rules, "a callback of the program runs in the queue of its depth") {
  OrderedExecutor& group = new_group();
  Names names;
  completed()->attach(record_queue(names, group));
  settle(group);
  completed()->attach(record_queue(names, group.deeper()));
  settle(group.deeper());
  completed()->attach(record_queue(names, group));
  settle(group);
  CHECK(names == Names{"group.0", "group.1", "group.0"});
}

TEST_CASE_FIXTURE(Rules, "a callback in a serial queue attaches to a nested queue") {
  OrderedExecutor& group = new_group();
  OrderedExecutor& other = new_group("other");
  Names names;
  const auto attached_in_queue_to = [&](Executor& executor) {
    Signal recorded;
    completed()->attach(
        call_inside([&](Future& self) { self.attach(record_queue(names, executor, &recorded)); }, &group));
    recorded.wait();
  };
  attached_in_queue_to(group);
  attached_in_queue_to(group.deeper());
  attached_in_queue_to(other);
  attached_in_queue_to(group);
  CHECK(names == Names{"group.0>group.0", "group.0>group.1", "group.0>other.0", "group.0>group.0"});
}

TEST_CASE_FIXTURE(Rules, "a callback in a nested queue attaches one level deeper") {
  OrderedExecutor& group = new_group();
  Names names;
  Signal recorded;
  const auto twice_inside = [&](Future& self) { self.attach(record_queue(names, group.deeper(), &recorded)); };
  completed()->attach(call_inside([&](Future& self) { self.attach(call_inside(twice_inside, &group)); }, &group));
  recorded.wait();
  CHECK(names == Names{"group.0>group.0>group.1"});
}

TEST_CASE_FIXTURE(Rules, "threads that run no serial queue's callback share the program's queue") {
  OrderedExecutor& group = new_group();
  const FuturePtr first = pending();
  Order order;
  first->attach(call_inside(mark(order, 1), &group));
  std::thread([&] { completed()->attach(call_inside(mark(order, 2), &group)); }).join();
  first->complete({});
  settle(group);
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "the program and a serial queue do not wait for each other") {
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
  SUBCASE("the program's callback runs while the serial queue's callback waits") {
    completed()->attach(call_inside(mark(order, 1), &group));
    settle(group);
    of_queue->complete({});
    ran_in_queue.wait();
    CHECK(order == Order{1, 2});
  }
  SUBCASE("the serial queue's callback runs while the program's callback waits") {
    of_program->attach(call_inside(mark(order, 1), &group));
    of_queue->complete({});
    ran_in_queue.wait();
    of_program->complete({});
    settle(group);
    CHECK(order == Order{2, 1});
  }
}

TEST_CASE_FIXTURE(Rules, "second steps of a chain do not delay the next chain") {
  OrderedExecutor& group = new_group();
  const FuturePtr issued = completed();
  const FuturePtr results[2] = {pending(), pending()};  // of the first steps; both complete after both steps have run
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

TEST_CASE_FIXTURE(Rules, "serial queues keep their order for any order of completion") {
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
      // Each callback attaches one more, to a future that may already be done.
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

TEST_CASE_FIXTURE(Rules, "a callback without a place goes to the end") {
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

TEST_CASE_FIXTURE(Rules, "in a forked child no callback runs and no lock is taken") {
  OrderedExecutor& group = new_group();
  settle(group);
  static int ran = 0;
  CHECK(in_forked_child([&] {
    completed()->attach(call_inside([](Future&) { ++ran; }, &group));
    return ran == 0;
  }));
}

TEST_SUITE_END();
