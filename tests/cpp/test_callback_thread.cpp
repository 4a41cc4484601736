// The callback thread, which runs foreign callbacks for threads outside the runtime: callbacks, drops, help() and
// stop().
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "callback.h"
#include "core/callback_thread.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;
using Clock = std::chrono::steady_clock;

namespace {

// Return a continuation whose parent is done, so that it can be posted.
Callback* due(Callback::Run run, std::uint8_t flags = Continuation::foreign) {
  Callback* c = call(std::move(run), flags);
  c->parent = completed();
  return c;
}

// Owns the continuations that a stopped callback thread leaks by design.
class Leaked {
 public:
  Callback* operator()(Callback* c) {
    callbacks_.push_back(c);
    return c;
  }
  ~Leaked() {
    for (Callback* c : callbacks_) delete c;
  }

 private:
  std::vector<Callback*> callbacks_;
};

// A callback thread, and whether it has stopped.
struct Round {
  CallbackThread thread;
  std::atomic<bool> stopped{false};
};

// A continuation that counts each time it is abandoned after its thread has stopped.
struct Probe final : Continuation {
  void run(Future&) noexcept override {}
  void abandon() noexcept override { late += round->stopped ? 1 : 0; }
  Round* round = nullptr;
  static inline std::atomic<int> late{0};
};

}  // namespace

TEST_SUITE_BEGIN("callback_thread");

TEST_CASE_FIXTURE(Rules, "callbacks of engine futures run in order on the callback thread") {
  constexpr int kFutures = 100;
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  std::string name(16, '\0');
  on_engine_thread([&] {
    for (int i = 0; i < kFutures; ++i) {
      const FuturePtr future = pending();
      future->attach(call_inside([&, i](Future&) {
        order.push_back(i);
        threads.push_back(std::this_thread::get_id());
        pthread_getname_np(pthread_self(), name.data(), name.size());
      }));
      future->complete({});
    }
  });
  settle_callback_thread();
  REQUIRE(order.size() == kFutures);
  CHECK(std::is_sorted(order.begin(), order.end()));
  CHECK(std::equal(threads.begin() + 1, threads.end(), threads.begin()));
  CHECK(threads.front() != std::this_thread::get_id());
  CHECK_FALSE(CallbackThread::get().is_current());
  CHECK(std::string(name.c_str()) == "cudafuture-cb");
}

TEST_CASE_FIXTURE(Rules, "callbacks_run() counts the callbacks") {
  CallbackThread thread;
  for (int i = 0; i < 5; ++i) thread.post(due({}));
  thread.stop();
  CHECK(thread.callbacks_run() == 5);
}

TEST_CASE_FIXTURE(Rules, "an object dropped outside the runtime dies on the callback thread") {
  std::thread::id destroyed_in;
  bool inside = false;
  const auto note_destruction = [&] {
    destroyed_in = std::this_thread::get_id();
    inside = Runtime::inside();
  };
  SUBCASE("dropped by its owner") {
    on_engine_thread([&] { object(note_destruction); });
  }
  SUBCASE("dropped with the future that owns it") {
    on_engine_thread([&] {
      const FuturePtr future = pending();
      future->complete(Value::of_object(object(note_destruction)));
    });
  }
  SUBCASE("dropped as the value for a future that is done") {
    const FuturePtr future = completed();
    on_engine_thread([&] { future->complete(Value::of_object(object(note_destruction))); });
  }
  settle_callback_thread();
  CHECK(inside);
  CHECK(destroyed_in != std::thread::id());
  CHECK(destroyed_in != std::this_thread::get_id());
}

TEST_CASE_FIXTURE(Rules, "an object that is dropped inside the runtime is destroyed at once") {
  std::thread::id destroyed_in;
  Inside inside;
  object([&] { destroyed_in = std::this_thread::get_id(); });
  CHECK(destroyed_in == std::this_thread::get_id());
}

TEST_CASE_FIXTURE(Rules, "a callback that a callback posts runs after the callbacks already posted") {
  CallbackThread& thread = CallbackThread::get();
  std::vector<int> order;
  Signal both_posted;
  thread.post(due([&](Future&) {
    both_posted.wait();
    thread.post(due([&](Future&) { order.push_back(3); }));
    order.push_back(1);
  }));
  thread.post(due([&](Future&) { order.push_back(2); }));
  both_posted.send();
  settle_callback_thread();
  CHECK(order == std::vector{1, 2, 3});
}

TEST_CASE_FIXTURE(Rules, "the callback thread releases the runtime's lock while it is idle") {
  settle_callback_thread();
  Inside inside;  // deadlocks if the callback thread keeps the lock
  CHECK(Runtime::inside());
}

TEST_CASE_FIXTURE(Rules, "help() in a callback runs the awaited callback behind it") {
  CallbackThread& thread = CallbackThread::get();
  const FuturePtr awaited = pending();
  std::vector<int> order;
  Signal both_posted;
  thread.post(due([&](Future&) {
    order.push_back(1);
    both_posted.wait();
    thread.help(*awaited, nullptr);
    CHECK(awaited->done());
    CHECK(Runtime::inside());
    order.push_back(3);
  }));
  thread.post(due([&](Future&) {
    order.push_back(2);
    awaited->complete({});
  }));
  both_posted.send();
  settle_callback_thread();
  CHECK(order == std::vector{1, 2, 3});
}

TEST_CASE_FIXTURE(Rules, "help() returns when an engine completes the future") {
  CallbackThread& thread = CallbackThread::get();
  const FuturePtr awaited = pending();
  Signal helping;
  Signal helped;
  thread.post(due([&](Future&) {
    helping.send();
    thread.help(*awaited, nullptr);
    CHECK(awaited->done());
    helped.send();
  }));
  helping.wait();
  {
    Inside inside;
  }  // deadlocks if help() sleeps with the lock
  on_engine_thread([&] { awaited->complete({}); });
  helped.wait();
}

TEST_CASE_FIXTURE(Rules, "help() returns at its deadline, and all posted callbacks run") {
  CallbackThread& thread = CallbackThread::get();
  const FuturePtr never = pending();
  Signal helped;
  int ran = 0;
  thread.post(due([&](Future&) {
    const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(2);
    thread.help(*never, &deadline);
    CHECK(Clock::now() >= deadline);
    CHECK(Runtime::inside());
    helped.send();
  }));
  for (int i = 0; i < 10; ++i) thread.post(due([&](Future&) { ++ran; }));
  helped.wait();
  settle_callback_thread();
  CHECK(ran == 10);
}

TEST_CASE_FIXTURE(Rules, "help() returns at once if the future is done") {
  CallbackThread& thread = CallbackThread::get();
  std::vector<int> order;
  Signal both_posted;
  thread.post(due([&](Future&) {
    both_posted.wait();
    thread.help(*completed(), nullptr);
    order.push_back(1);
  }));
  thread.post(due([&](Future&) { order.push_back(2); }));
  both_posted.send();
  settle_callback_thread();
  CHECK(order == std::vector{1, 2});
}

TEST_CASE_FIXTURE(Rules, "nested help() on the callback thread stops at a maximum depth") {
  constexpr int kMany = 300;
  CallbackThread& thread = CallbackThread::get();
  const FuturePtr awaited = pending();
  Signal all_posted;
  int depth = 0;
  int deepest = 0;
  int ran = 0;
  for (int i = 0; i < kMany; ++i) {
    thread.post(due([&](Future&) {
      all_posted.wait();
      deepest = std::max(deepest, ++depth);
      thread.help(*awaited, nullptr);
      --depth;
      if (++ran == 1) awaited->complete({});  // in the deepest callback, where help() did nothing
    }));
  }
  all_posted.send();
  settle_callback_thread();
  CHECK(ran == kMany);
  CHECK(deepest > 1);
  CHECK(deepest <= 100);
}

TEST_CASE_FIXTURE(Rules, "stop() runs posted callbacks and refuses later ones") {
  CallbackThread thread;
  Leaked leaked;
  int ran = 0;
  int dropped = 0;
  for (int i = 0; i < 100; ++i) thread.post(due([&](Future&) { ++ran; }));
  Foreign released = object([&] { ++dropped; });
  thread.post_release(released.take());
  thread.post_abandon(new Callback({}, Continuation::foreign, nullptr, [&] { ++dropped; }));
  thread.stop();
  CHECK(ran == 100);
  CHECK(dropped == 2);

  thread.post(leaked(due([&](Future&) { ++ran; })));
  Foreign kept = object();
  thread.post_release(kept.get());
  thread.post_abandon(leaked(call({})));
  int abandoned = 0;
  {
    const Inside inside;
    auto* const late = new Callback({}, Continuation::foreign, nullptr, [&] { ++abandoned; });
    late->parent = completed();
    thread.post(late);
  }
  thread.stop();
  CHECK(abandoned == 1);
  CHECK(ran == 100);
  CHECK(thread.callbacks_run() == 100);
}

TEST_CASE_FIXTURE(Rules, "a callback thread that is stopped before its start never starts") {
  CallbackThread thread;
  Leaked leaked;
  thread.stop();
  thread.post(leaked(due([](Future&) { FAIL_CHECK("ran after stop()"); })));
}

TEST_CASE_FIXTURE(Rules, "stop() ends a help() whose future never completes") {
  auto thread = std::make_unique<CallbackThread>();
  const FuturePtr never = pending();
  Signal helping;
  thread->post(due([&](Future&) {
    helping.send();
    thread->help(*never, nullptr);
    CHECK_FALSE(never->done());
  }));
  helping.wait();
  thread->stop();
}

TEST_CASE_FIXTURE(Rules, "no continuation is abandoned after stop() returns") {
  // Never freed: a thread that starts too late would still use them, and its CallbackThread could not be destroyed.
  static auto* const rounds = new std::vector<std::unique_ptr<Round>>;
  static auto* const probes = new std::vector<std::unique_ptr<Probe>>;

  for (int n = 0; n < 1000; ++n) {
    Round& round = *rounds->emplace_back(std::make_unique<Round>());
    std::vector<Probe*> mine;
    for (int k = 0; k < 4; ++k) {
      mine.push_back(probes->emplace_back(std::make_unique<Probe>()).get());
      mine.back()->round = &round;
    }
    together(2, [&](int i) {
      if (i == 0) {
        round.thread.stop();
        round.stopped = true;
      } else {
        for (Probe* probe : mine) round.thread.post_abandon(probe);
      }
    });
  }
  CHECK(Probe::late == 0);
}

TEST_CASE_FIXTURE(Rules, "a finalizing runtime leaks posted callbacks and ends the thread") {
  CallbackThread thread;
  Leaked leaked;
  Runtime::set_finalizing(true);
  thread.post(leaked(due([](Future&) { FAIL_CHECK("ran without the runtime"); })));
  thread.stop();
  Runtime::set_finalizing(false);
}

TEST_SUITE_END();
