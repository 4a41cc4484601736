// Where continuations run, and in which order: the queue of a thread, executors, helping.
#include <string>
#include <thread>
#include <vector>

#include "callback.h"
#include "core/callback_thread.h"
#include "core/completion_queue.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

// Keeps what it is given until the test runs it.
struct HeldBack final : Executor {
  void post(Continuation* c) noexcept override { held.push_back(c); }
  void run_all() {
    for (Continuation* c : std::exchange(held, {})) {
      const FuturePtr parent = std::move(c->parent);
      c->run(*parent);
    }
  }
  std::vector<Continuation*> held;
};

}  // namespace

TEST_SUITE_BEGIN("completion_queue");

TEST_CASE_FIXTURE(Rules, "callbacks run in the order in which they were attached") {
  const FuturePtr future = pending();
  Order order;
  for (int i = 0; i < 10; ++i) future->attach(call([&, i](Future&) { order.push_back(i); }));
  future->complete({});
  CHECK(order == Order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(CompletionQueue::current().empty());
  CHECK_FALSE(CompletionQueue::current().draining());
}

TEST_CASE_FIXTURE(Rules, "a completion inside a callback adds to the queue and runs nothing there") {
  const FuturePtr outer = pending();
  const FuturePtr inner = pending();
  Order order;
  outer->attach(call([&](Future&) {
    order.push_back(1);
    inner->complete({});
    CHECK(CompletionQueue::current().draining());
    order.push_back(2);
  }));
  outer->attach(call([&](Future&) { order.push_back(3); }));
  inner->attach(call([&](Future&) { order.push_back(4); }));
  outer->complete({});
  CHECK(order == Order{1, 2, 3, 4});
}

TEST_CASE_FIXTURE(Rules, "a callback attached inside a callback to a done future waits its turn") {
  const FuturePtr done = completed();
  Order order;
  done->attach(call([&](Future& self) {
    self.attach(call([&](Future&) { order.push_back(2); }));
    order.push_back(1);
  }));
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "a callback that a native one causes from inside the runtime runs inside it") {
  const FuturePtr outer = pending();
  const FuturePtr inner = pending();
  Signal ran;
  inner->attach(call_inside([&](Future&) { ran.send(); }));
  outer->attach(call([&](Future&) {
    const Inside for_a_moment;  // as to drop a tensor, whose last reference completes a future
    inner->complete({});
  }));
  std::thread([&] { outer->complete({}); }).join();
  ran.wait();
}

TEST_CASE_FIXTURE(Rules, "each thread has a queue of its own") {
  const FuturePtr outer = pending();
  const FuturePtr inner = pending();
  bool ran = false;
  inner->attach(call([&](Future&) { ran = true; }));
  outer->attach(call([&](Future&) {
    std::thread([&] { inner->complete({}); }).join();
    CHECK(ran);  // there, not behind us
  }));
  outer->complete({});
}

TEST_CASE_FIXTURE(Rules, "the parent lives until its callback returns") {
  FuturePtr future = pending();
  future->set_name("still here");
  future->attach(call([&](Future& parent) {
    future.reset();
    CHECK(parent.name() == "still here");
  }));
  Future& raw = *future;
  const FuturePtr completing = future;  // whoever completes holds a reference
  raw.complete({});
  CHECK_FALSE(future);
}

TEST_CASE_FIXTURE(Rules, "an executor gets its callbacks in order, with the parent") {
  HeldBack executor;
  Order order;
  FuturePtr future = pending();
  for (int i = 0; i < 3; ++i) {
    future->attach(
        call([&, i](Future& parent) { order.push_back(parent.done() ? i : -1); }, Continuation::none, &executor));
  }
  future->complete({});
  future.reset();
  CHECK(order.empty());
  CHECK(executor.held.size() == 3);
  executor.run_all();
  CHECK(order == Order{0, 1, 2});
}

TEST_CASE_FIXTURE(Rules,
                  "a callback runs on the executor that it names; the future's own is a fact that nothing here uses") {
  HeldBack usual;
  HeldBack named;
  Order order;
  const FuturePtr future = pending();
  future->set_default_executor(&usual);
  const auto mark = [&](int i) { return [&order, i](Future&) { order.push_back(i); }; };
  future->attach(call(mark(0)));
  future->attach(call_inside(mark(1)));
  future->attach(call_inside(mark(2), &named));
  future->attach(call_inside(mark(3), &InlineExecutor::get()));
  const Inside inside;
  future->complete({});
  CHECK(order == Order{0, 1, 3});
  CHECK(usual.held.empty());
  named.run_all();
  CHECK(order == Order{0, 1, 3, 2});
}

TEST_CASE_FIXTURE(Rules, "an executor hears of a callback when it is attached, before anybody can post it") {
  struct Enrolling final : Executor {
    void enrol(Continuation&) noexcept override { heard.push_back("enrol"); }
    void post(Continuation* c) noexcept override {
      heard.push_back("post");
      InlineExecutor::get().post(c);
    }
    std::vector<std::string> heard;
  } executor;
  using Heard = std::vector<std::string>;
  const FuturePtr future = pending();
  future->attach(call({}, Continuation::none, &executor));
  CHECK(executor.heard == Heard{"enrol"});
  future->complete({});
  CHECK(executor.heard == Heard{"enrol", "post"});
  future->attach(call({}, Continuation::none, &executor));
  CHECK(executor.heard == Heard{"enrol", "post", "enrol", "post"});
}

TEST_CASE_FIXTURE(Rules, "a foreign callback runs where the future is completed, when that thread is inside") {
  const FuturePtr future = pending();
  std::thread::id ran_in;
  future->attach(call_inside([&](Future&) { ran_in = std::this_thread::get_id(); }));
  Inside inside;
  future->complete({});
  CHECK(ran_in == std::this_thread::get_id());
}

TEST_CASE_FIXTURE(Rules, "a foreign callback goes to the callback thread when the completing thread is outside") {
  for (Executor* executor : {static_cast<Executor*>(nullptr), static_cast<Executor*>(&InlineExecutor::get())}) {
    const FuturePtr future = pending();
    Signal ran;
    bool in_callback_thread = false;
    future->attach(call_inside(
        [&](Future&) {
          in_callback_thread = CallbackThread::get().is_current();
          ran.send();
        },
        executor));
    on_engine_thread([&] { future->complete({}); });
    ran.wait();
    CHECK(in_callback_thread);
  }
}

TEST_CASE_FIXTURE(Rules, "the inline executor runs what is posted to it in the posting thread, in its turn") {
  Order order;
  const auto post = [&](int i, Callback::Run then = {}) {
    Callback* c = call([&order, i, then](Future& parent) {
      order.push_back(i);
      if (then) then(parent);
    });
    c->parent = completed();
    InlineExecutor::get().post(c);
  };
  post(1, [&](Future&) {
    post(3);
    order.push_back(2);
  });
  CHECK(order == Order{1, 2, 3});
}

TEST_CASE_FIXTURE(Rules, "helping runs what stands in the queue until the awaited future is done, and no further") {
  const FuturePtr trigger = pending();
  const FuturePtr awaited = pending();
  Order order;
  trigger->attach(call([&](Future&) {
    order.push_back(1);
    CompletionQueue::current().help(*awaited);  // without it this callback would wait for ever
    CHECK(awaited->done());
    order.push_back(4);
  }));
  trigger->attach(call([&](Future&) { order.push_back(2); }));
  trigger->attach(call([&](Future&) {
    order.push_back(3);
    awaited->complete({});
  }));
  trigger->attach(call([&](Future&) { order.push_back(5); }));
  trigger->complete({});
  CHECK(order == Order{1, 2, 3, 4, 5});
}

TEST_CASE_FIXTURE(Rules, "helping with an empty queue, or for a done future, returns at once") {
  const FuturePtr never = pending();
  CompletionQueue::current().help(*never);
  int ran = 0;
  const FuturePtr trigger = pending();
  trigger->attach(call([&](Future&) {
    CompletionQueue::current().help(*completed());
    CHECK(ran == 0);
  }));
  trigger->attach(call([&](Future&) { ++ran; }));
  trigger->complete({});
  CHECK(ran == 1);
}

TEST_CASE_FIXTURE(Rules, "helpers that help end at a depth, and everything still runs") {
  constexpr int kMany = 1000;
  const FuturePtr never = pending();
  const FuturePtr trigger = pending();
  int depth = 0;
  int deepest = 0;
  int ran = 0;
  for (int i = 0; i < kMany; ++i) {
    trigger->attach(call([&](Future&) {
      deepest = std::max(deepest, ++depth);
      CompletionQueue::current().help(*never);
      --depth;
      ++ran;
    }));
  }
  trigger->complete({});
  CHECK(ran == kMany);
  CHECK(deepest > 1);
  CHECK(deepest <= 100);
}

TEST_SUITE_END();
