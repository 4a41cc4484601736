// Serial queues: callbacks run in attachment order, and a place is removed when its callback will not run.
#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "rules.h"
#include "serial_queues.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

Order ascending(int count) {
  Order order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

// A continuation that its future may drop at any time.
struct Moot final : Continuation {
  using Continuation::Continuation;
  void run(Future&) noexcept override { delete this; }
  void abandon() noexcept override { delete this; }
  bool is_moot() const noexcept override { return true; }
};

}  // namespace

TEST_SUITE_BEGIN("serial_queue");

TEST_CASE_FIXTURE(Rules, "callbacks run in attachment order for any order of completion") {
  constexpr int kCallbacks = 50;
  for (unsigned seed = 0; seed < 10; ++seed) {
    SerialQueue& queue = new_serial_queue();
    std::vector<FuturePtr> parents = many_pending(kCallbacks);
    Order order;
    for (int i = 0; i < kCallbacks; ++i) {
      parents[static_cast<std::size_t>(i)]->attach(call_inside(mark(order, i), &queue));
    }
    std::shuffle(parents.begin(), parents.end(), std::mt19937(seed));
    const auto complete_all = [&] {
      for (const FuturePtr& parent : parents) parent->complete({});
    };
    if (seed % 2 == 0) {
      on_engine_thread(complete_all);
    } else {
      const Inside inside;
      complete_all();
    }
    settle(queue);
    CHECK(order == ascending(kCallbacks));
    CHECK(queue.length() == 0);
  }
}

TEST_CASE_FIXTURE(Rules, "a callback runs if its parent completes, fails or is cancelled") {
  SerialQueue& queue = new_serial_queue();
  std::vector<State> seen;
  const std::vector<FuturePtr> parents = many_pending(3);
  for (const FuturePtr& parent : parents) {
    parent->attach(call_inside([&](Future& self) { seen.push_back(self.state()); }, &queue));
  }
  parents[2]->cancel();
  parents[1]->fail(Value::of_error(nullptr));
  parents[1]->mark_seen();
  parents[0]->complete({});
  settle(queue);
  CHECK((seen == std::vector{State::completed, State::failed, State::cancelled}));
}

TEST_CASE_FIXTURE(Rules, "a callback that will not run leaves the queue") {
  SerialQueue& queue = new_serial_queue();
  Order order;
  FuturePtr first = pending();
  Callback* const leaves = call_inside(mark(order, 1), &queue);
  first->attach(leaves);
  const FuturePtr done = completed();
  done->attach(call_inside(mark(order, 2), &queue));
  done->attach(call_inside(mark(order, 3), &queue));
  CHECK(queue.length() == 3);
  SUBCASE("the callback is detached") {
    CHECK(first->detach(leaves));
    CHECK(queue.length() == 3);
    const Inside inside;
    leaves->abandon();
  }
  SUBCASE("the parent is destroyed inside the runtime") {
    const Inside inside;
    first.reset();
  }
  SUBCASE("the parent is destroyed outside the runtime") { first.reset(); }
  SUBCASE("the parent is cleared") {
    const Inside inside;
    first->clear();
  }
  settle(queue);
  CHECK(order == Order{2, 3});
}

TEST_CASE_FIXTURE(Rules, "callbacks anywhere in the queue can be detached") {
  SerialQueue& queue = new_serial_queue();
  Order order;
  const std::vector<FuturePtr> parents = many_pending(5);
  std::vector<Callback*> callbacks;
  for (int i = 0; i < 5; ++i) {
    callbacks.push_back(call_inside(mark(order, i), &queue));
    parents[static_cast<std::size_t>(i)]->attach(callbacks.back());
  }
  for (const std::size_t i : {4u, 1u, 3u}) {
    CHECK(parents[i]->detach(callbacks[i]));
    const Inside inside;
    callbacks[i]->abandon();
  }
  completed()->attach(call_inside(mark(order, 5), &queue));
  parents[2]->complete({});
  parents[0]->complete({});
  settle(queue);
  CHECK(order == Order{0, 2, 5});
  CHECK(queue.length() == 0);
}

TEST_CASE_FIXTURE(Rules, "a callback that its pending parent drops as moot leaves the queue") {
  SerialQueue& queue = new_serial_queue();
  Order order;
  const FuturePtr parent = pending();
  parent->attach(new Moot(Continuation::none, &queue));
  completed()->attach(call_inside(mark(order, 1), &queue));
  for (int i = 0; i < 1000; ++i) parent->attach(new Moot);  // enough that the parent removes moot ones
  settle(queue);
  CHECK(order == Order{1});
}

TEST_CASE_FIXTURE(Rules, "a callback of a done future runs in the serial queue") {
  SerialQueue& queue = new_serial_queue();
  std::thread::id ran_in;
  {
    const Inside inside;  // no callback of a serial queue can run while this thread holds the lock
    completed()->attach(call_inside([&](Future&) { ran_in = std::this_thread::get_id(); }, &queue));
    CHECK(ran_in == std::thread::id());
  }
  settle(queue);
  CHECK(ran_in != std::thread::id());
  CHECK(ran_in != std::this_thread::get_id());
}

TEST_CASE_FIXTURE(Rules, "a callback of a done future keeps its place in order") {
  SerialQueue& queue = new_serial_queue();
  Order order;
  const FuturePtr first = pending();
  first->attach(call_inside(mark(order, 1), &queue));
  completed()->attach(call_inside(mark(order, 2), &queue));
  CHECK(queue.length() == 2);
  first->complete({});
  settle(queue);
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "a callback keeps its place while it waits for the device") {
  const FreshAccelerator fresh;
  SerialQueue& queue = new_serial_queue();
  Order order;
  Accelerator::get().launch(stream(0, 0));
  const FuturePtr busy = completed(EventSet::record(device(0)));
  busy->attach(call(mark(order, 1), Continuation::foreign | Continuation::when_ready, &queue));
  completed()->attach(call_inside(mark(order, 2), &queue));
  CHECK(queue.length() == 2);
  Accelerator::get().finish_all();
  settle(queue);
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "current() returns the serial queue in its callbacks only") {
  SerialQueue& queue = new_serial_queue("mine");
  SerialQueue* in_queue = nullptr;
  SerialQueue* in_callback_thread = &queue;
  completed()->attach(call_inside([&](Future&) { in_queue = SerialQueue::current(); }, &queue));
  settle(queue);
  on_engine_thread([&] {
    const FuturePtr future = pending();
    future->attach(call_inside([&](Future&) { in_callback_thread = SerialQueue::current(); }));
    future->complete({});
  });
  settle_callback_thread();
  CHECK(in_queue == &queue);
  CHECK(in_queue->name() == "mine");
  CHECK(in_callback_thread == nullptr);
  CHECK(SerialQueue::current() == nullptr);
}

TEST_CASE_FIXTURE(Rules, "an inline callback runs before the next place of the queue") {
  SerialQueue& queue = new_serial_queue();
  const FuturePtr inner = pending();
  Order order;
  SerialQueue* seen = nullptr;
  inner->attach(call_inside([&](Future&) {
    order.push_back(2);
    seen = SerialQueue::current();
  }));
  {
    const Inside inside;
    completed()->attach(call_inside(
        [&](Future&) {
          inner->complete({});
          order.push_back(1);
        },
        &queue));
    completed()->attach(call_inside(mark(order, 3), &queue));
  }
  settle(queue);
  CHECK(order == Order{1, 2, 3});
  CHECK(seen == &queue);
}

TEST_CASE_FIXTURE(Rules, "a blocked serial queue does not delay another queue") {
  SerialQueue& blocked = new_serial_queue();
  SerialQueue& other = new_serial_queue();
  Signal go;
  Order order;
  completed()->attach(call_inside(
      [&](Future&) {
        wait_outside(go);
        order.push_back(2);
      },
      &blocked));
  completed()->attach(call_inside(
      [&](Future&) {
        order.push_back(1);
        go.send();
      },
      &other));
  settle(blocked);
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "a callback attached in the queue goes to its end") {
  SerialQueue& queue = new_serial_queue();
  Order order;
  {
    const Inside inside;  // attaches both before the first one runs
    completed()->attach(call_inside(
        [&](Future& self) {
          self.attach(call_inside(mark(order, 3), &queue));
          order.push_back(1);
        },
        &queue));
    completed()->attach(call_inside(mark(order, 2), &queue));
  }
  settle(queue);
  settle(queue);  // the first settle() may have taken its place before callback 3
  CHECK(order == Order{1, 2, 3});
}

TEST_CASE_FIXTURE(Rules, "a long chain of completions runs in the serial queue") {
  constexpr int kLinks = 10'000;
  SerialQueue& queue = new_serial_queue();
  std::vector<FuturePtr> parents = many_pending(kLinks + 1);
  Order order;
  for (int i = 0; i < kLinks; ++i) {
    const FuturePtr next = parents[static_cast<std::size_t>(i) + 1];
    parents[static_cast<std::size_t>(i)]->attach(call_inside(
        [&order, next, i](Future&) {
          order.push_back(i);
          next->complete({});
        },
        &queue));
  }
  parents[0]->complete({});
  settle(queue);
  CHECK(order == ascending(kLinks));
  CHECK(parents[kLinks]->done());
}

namespace {

constexpr int kQueues = 3;
constexpr std::size_t kCallbacks = 200;

// One thread attaches callbacks to random serial queues and detaches some of them. The other threads complete the
// futures in random order.
void race(unsigned seed) {
  std::mt19937 random(seed);
  const std::vector<FuturePtr> parents = many_pending(kCallbacks);
  std::vector<FuturePtr> shuffled = parents;
  std::shuffle(shuffled.begin(), shuffled.end(), random);
  SerialQueue* queues[kQueues];
  for (SerialQueue*& queue : queues) queue = &new_serial_queue();
  Order ran[kQueues];
  Order expected[kQueues];
  together(4, [&](int thread) {
    for (std::size_t i = 0; i < kCallbacks; ++i) {
      if (thread > 0) {
        if (static_cast<int>(i % 3) == thread - 1) shuffled[i]->complete({});
        continue;
      }
      const std::size_t chosen = random() % kQueues;
      Callback* const c = call_inside(mark(ran[chosen], static_cast<int>(i)), queues[chosen]);
      parents[i]->attach(c);
      if (i % 5 == 0 && parents[i]->detach(c)) {
        const Inside inside;
        c->abandon();
      } else {
        expected[chosen].push_back(static_cast<int>(i));
      }
    }
  });
  for (int chosen = 0; chosen < kQueues; ++chosen) {
    settle(*queues[chosen]);
    CHECK(ran[chosen] == expected[chosen]);
    CHECK(queues[chosen]->length() == 0);
  }
}

}  // namespace

TEST_CASE_FIXTURE(Rules, "each serial queue keeps its order while several threads complete futures") {
  for (unsigned seed = 0; seed < 30; ++seed) race(seed);
}

TEST_CASE_FIXTURE(Rules, "in a forked child no callback gets a place or runs") {
  SerialQueue& queue = new_serial_queue();
  settle(queue);
  static int ran = 0;
  const FuturePtr before = pending();
  before->attach(call_inside([](Future&) { ++ran; }, &queue));
  CHECK(in_forked_child([&] {
    completed()->attach(call_inside([](Future&) { ++ran; }, &queue));
    before->complete({});
    return ran == 0;
  }));
  before->complete({});
  settle(queue);
  CHECK(ran == 1);
}

TEST_SUITE_END();
