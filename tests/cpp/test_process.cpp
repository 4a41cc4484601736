// The process: a child that was forked after use cannot use the library, and shutdown returns with futures pending.
//
// Tests that change the process permanently run in their own process, in test cases that are otherwise skipped.
#include <unistd.h>

#include <string>
#include <vector>

#include "callback.h"
#include "core/callback_thread.h"
#include "core/error.h"
#include "core/process.h"
#include "core/watcher.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

TEST_SUITE_BEGIN("process");

TEST_CASE_FIXTURE(Rules, "the parent of a forked child can still use the library") {
  completed();
  CHECK(in_forked_child([] { return true; }));
  CHECK_FALSE(is_forked_child());
  refuse_after_fork();
  const FuturePtr future = pending();
  Signal ran;
  future->attach(call_inside([&](Future&) { ran.send(); }));
  on_engine_thread([&] { future->complete({}); });
  ran.wait();
}

TEST_CASE_FIXTURE(Rules, "refuse_after_fork() gives the reason in a forked child") {
  completed();
  CHECK(in_forked_child([parent = std::to_string(getpid())] {
    if (!is_forked_child()) return false;
    try {
      refuse_after_fork();
    } catch (const Error& error) {
      const std::string what = error.what();
      return error.kind() == ErrorKind::invalid_state && what.find(parent) != std::string::npos &&
             what.find("'spawn'") != std::string::npos;
    }
    return false;
  }));
}

TEST_CASE_FIXTURE(Rules, "a forked child can drop futures without callbacks or destructors") {
  FreshAccelerator fresh;
  settle_callback_thread();
  static int ran = 0;
  FuturePtr with_callback = pending();
  with_callback->attach(new Callback({}, Continuation::foreign, nullptr, [] { ++ran; }));
  FuturePtr with_object = pending();
  with_object->complete(Value::of_object(object([] { ++ran; })));
  accelerator.launch(stream(0, 0));
  FuturePtr with_event = completed(EventSet::record(device(0)));
  CHECK(in_forked_child([&] {
    const int alive = accelerator.events_alive();
    with_event->attach(call([](Future&) { ++ran; }, Continuation::when_ready));
    with_callback.reset();
    with_object.reset();
    with_event.reset();
    shut_down();
    return ran == 0 && accelerator.events_alive() == alive && !is_shut_down();
  }));
}

TEST_CASE("alone: a child forked before the first future may use the library" * doctest::skip()) {
  const bool is_usable = in_forked_child([] {
    if (is_forked_child()) return false;
    refuse_after_fork();
    const FuturePtr future = pending();
    bool ran = false;
    future->attach(call([&](Future&) { ran = true; }));
    return future->complete({}) && ran;
  });
  CHECK(is_usable);
  CHECK_FALSE(is_forked_child());
}

TEST_CASE_FIXTURE(Rules, "a child forked before the first future may use the library") {
  run_alone("alone: a child forked before the first future may use the library");
}

TEST_CASE("alone: shutdown with pending futures" * doctest::skip()) {
  accelerator.launch(stream(0, 0));
  const auto count = [](std::atomic<int>& n) { return [&n](Future&) { ++n; }; };
  std::atomic<int> posted{0};
  std::atomic<int> late{0};
  std::vector<Callback*> leaked;

  const FuturePtr busy = completed(EventSet::record(device(0)));
  std::atomic<int> abandoned{0};
  const auto when_ready = [&] {
    constexpr auto flags = static_cast<std::uint8_t>(Continuation::foreign | Continuation::when_ready);
    return new Callback(count(late), flags, nullptr, [&] { ++abandoned; });
  };
  busy->attach(when_ready());  // watched, and its work never finishes
  const FuturePtr never = pending();
  never->attach(call_inside(count(late)));
  on_engine_thread([&] {
    for (int i = 0; i < 1000; ++i) {
      const FuturePtr future = pending();
      future->attach(call_inside(count(posted)));
      future->complete({});
    }
  });
  CHECK_FALSE(is_shut_down());
  shut_down();
  CHECK(is_shut_down());
  CHECK(posted == 1000);  // all callbacks that were posted before have run
  CHECK(abandoned == 1);
  shut_down();
  {
    const Inside inside;
    busy->attach(when_ready());
    CHECK(abandoned == 2);
  }
  CHECK_FALSE(CallbackThread::get().has_lost());

  // Engines do not know of the shutdown and still complete futures. No callback runs, and no call blocks.
  on_engine_thread([&] {
    for (int i = 0; i < 10; ++i) {
      const FuturePtr future = pending();
      leaked.push_back(call_inside(count(late)));
      future->attach(leaked.back());
      future->complete({});
    }
  });
  leaked.push_back(when_ready());
  busy->attach(leaked.back());
  CHECK(CallbackThread::get().has_lost());
  const FuturePtr plain = pending();
  std::atomic<int> here{0};
  plain->attach(call(count(here)));
  CHECK(plain->complete({}));
  CHECK(here == 1);  // the core's own continuations still run in the completing thread
  {
    Inside inside;
    never->clear();
  }
  CHECK(late == 0);
  CHECK(Runtime::take_broken().empty());
  for (Callback* c : leaked) delete c;
}

TEST_CASE_FIXTURE(Rules, "shutdown with pending futures runs all posted callbacks and returns") {
  run_alone("alone: shutdown with pending futures");
}

TEST_CASE("alone: shutdown while engines complete futures" * doctest::skip()) {
  // The library leaks callbacks that are posted too late, by design. Therefore the test owns all callbacks.
  struct Counted final : Continuation {
    Counted() : Continuation(foreign) {}
    void run(Future&) noexcept override { ++runs; }
    void abandon() noexcept override {}
    std::atomic<int> runs{0};
  };
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  std::vector<Counted> callbacks(kThreads * kEach);
  std::atomic<int> completed_count{0};
  together(kThreads + 1, [&](int thread) {
    if (thread == kThreads) {
      while (completed_count < kThreads * 10) std::this_thread::yield();
      shut_down();
      return;
    }
    EngineThread engine;
    for (int i = 0; i < kEach; ++i) {
      const FuturePtr future = pending();
      future->attach(&callbacks[static_cast<std::size_t>(thread * kEach + i)]);
      future->complete({});
      ++completed_count;
    }
  });
  int ran = 0;
  int ran_twice = 0;
  for (const Counted& c : callbacks) {
    ran += c.runs;
    ran_twice += c.runs > 1;
  }
  CHECK(ran_twice == 0);
  CHECK(static_cast<int>(CallbackThread::get().callbacks_run()) == ran);
}

TEST_CASE_FIXTURE(Rules, "shutdown while engines complete futures runs each callback at most once") {
  run_alone("alone: shutdown while engines complete futures");
}

TEST_CASE("alone: shutdown after the interpreter has finalized" * doctest::skip()) {
  Runtime::set_finalizing(true);
  Callback* const callback = call_inside([](Future&) { FAIL_CHECK("ran without the runtime"); });
  Foreign kept = object();
  on_engine_thread([&] {
    const FuturePtr future = pending();
    future->attach(callback);
    future->complete({});
    release_foreign(kept.get());
  });
  shut_down();
  Runtime::set_finalizing(false);
  CHECK(Object::alive == 1);
  Inside inside;
  kept = Foreign();
  delete callback;
}

TEST_CASE_FIXTURE(Rules, "shutdown after finalization leaks pending callbacks and objects") {
  run_alone("alone: shutdown after the interpreter has finalized");
}

TEST_SUITE_END();
