// The thread and the order in which continuations run: the queue of a thread, executors, help().
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

// An executor that keeps posted continuations until the test runs them.
struct HoldingExecutor final : Executor {
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

TEST_CASE_FIXTURE(Rules, "callbacks of a future run in attachment order") {
  const FuturePtr future = pending();
  Order order;
  for (int i = 0; i < 10; ++i) future->attach(call([&, i](Future&) { order.push_back(i); }));
  future->complete({});
  CHECK(order == Order{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(CompletionQueue::current().empty());
  CHECK_FALSE(CompletionQueue::current().draining());
}

TEST_CASE_FIXTURE(Rules, "callbacks of a future completed in a callback run later") {
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

TEST_CASE_FIXTURE(Rules, "a callback attached to a done future waits for the current one") {
  const FuturePtr done = completed();
  Order order;
  done->attach(call([&](Future& self) {
    self.attach(call([&](Future&) { order.push_back(2); }));
    order.push_back(1);
  }));
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "a foreign callback behind a native one runs inside the runtime") {
  const FuturePtr outer = pending();
  const FuturePtr inner = pending();
  Signal ran;
  inner->attach(call_inside([&](Future&) { ran.send(); }));
  outer->attach(call([&](Future&) {
    const Inside inside;  // like a callback that drops the last reference to a tensor
    inner->complete({});
  }));
  std::thread([&] { outer->complete({}); }).join();
  ran.wait();
}

TEST_CASE_FIXTURE(Rules, "each thread has its own queue") {
  const FuturePtr outer = pending();
  const FuturePtr inner = pending();
  bool ran = false;
  inner->attach(call([&](Future&) { ran = true; }));
  outer->attach(call([&](Future&) {
    std::thread([&] { inner->complete({}); }).join();
    CHECK(ran);  // in the other thread, not later in this thread's queue
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
  const FuturePtr completing = future;  // the completing thread holds a reference
  raw.complete({});
  CHECK_FALSE(future);
}

TEST_CASE_FIXTURE(Rules, "an executor receives callbacks in attachment order, with the parent") {
  HoldingExecutor executor;
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

TEST_CASE_FIXTURE(Rules, "a callback runs on its own executor, not the future's") {
  HoldingExecutor by_default;
  HoldingExecutor named;
  Order order;
  const FuturePtr future = pending();
  future->set_default_executor(&by_default);
  const auto mark = [&](int i) { return [&order, i](Future&) { order.push_back(i); }; };
  future->attach(call(mark(0)));
  future->attach(call_inside(mark(1)));
  future->attach(call_inside(mark(2), &named));
  future->attach(call_inside(mark(3), &InlineExecutor::get()));
  const Inside inside;
  future->complete({});
  CHECK(order == Order{0, 1, 3});
  CHECK(by_default.held.empty());
  named.run_all();
  CHECK(order == Order{0, 1, 3, 2});
}

TEST_CASE_FIXTURE(Rules, "an executor enrols a callback at attachment, before the callback is posted") {
  struct EnrollingExecutor final : Executor {
    void enrol(Continuation&) noexcept override { calls.push_back("enrol"); }
    void post(Continuation* c) noexcept override {
      calls.push_back("post");
      InlineExecutor::get().post(c);
    }
    std::vector<std::string> calls;
  } executor;
  using Calls = std::vector<std::string>;
  const FuturePtr future = pending();
  future->attach(call({}, Continuation::none, &executor));
  CHECK(executor.calls == Calls{"enrol"});
  future->complete({});
  CHECK(executor.calls == Calls{"enrol", "post"});
  future->attach(call({}, Continuation::none, &executor));
  CHECK(executor.calls == Calls{"enrol", "post", "enrol", "post"});
}

TEST_CASE_FIXTURE(Rules, "a foreign callback runs in the thread inside the runtime") {
  const FuturePtr future = pending();
  std::thread::id ran_in;
  future->attach(call_inside([&](Future&) { ran_in = std::this_thread::get_id(); }));
  Inside inside;
  future->complete({});
  CHECK(ran_in == std::this_thread::get_id());
}

TEST_CASE_FIXTURE(Rules, "a foreign callback leaves a thread outside the runtime") {
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

TEST_CASE_FIXTURE(Rules, "the inline executor runs callbacks in posting order") {
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

TEST_CASE_FIXTURE(Rules, "help() runs queued callbacks until the future is done") {
  const FuturePtr trigger = pending();
  const FuturePtr awaited = pending();
  Order order;
  trigger->attach(call([&](Future&) {
    order.push_back(1);
    CompletionQueue::current().help(*awaited);  // without it a wait in this callback would never end
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

TEST_CASE_FIXTURE(Rules, "help() returns at once without callbacks or on a done future") {
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

TEST_CASE_FIXTURE(Rules, "nested help() stops at a maximum depth, and all callbacks still run") {
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
