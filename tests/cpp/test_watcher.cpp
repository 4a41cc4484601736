// The watcher: it runs callbacks when the device work behind their futures has finished, and never enters the runtime.
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "callback.h"
#include "core/callback_thread.h"
#include "core/watcher.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"
#include "watcher_rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;
using namespace std::chrono_literals;

TEST_SUITE_BEGIN("watcher");

TEST_CASE_FIXTURE(WatcherRules, "a when_ready callback runs on the watcher's thread") {
  const FuturePtr future = busy();
  Signal ran;
  std::thread::id ran_in;
  future->attach(call(
      [&](Future& parent) {
        CHECK(parent.device_work_finished());
        ran_in = std::this_thread::get_id();
        ran.send();
      },
      Continuation::when_ready));
  CHECK_FALSE(ran.sent());
  CHECK(Watcher::get().statistics().pending == 1);
  accelerator.finish_all();
  ran.wait();
  CHECK(ran_in != std::this_thread::get_id());
  CHECK(future->late_error() == nullptr);
}

TEST_CASE_FIXTURE(WatcherRules, "a when_ready callback waits for the last of several devices") {
  for (int i : {0, 1, 2}) accelerator.launch(stream(i, 0));
  const FuturePtr future = completed(EventSet::record({device(0), device(1), device(2)}));
  Signal ran;
  std::atomic<bool> all_finished{false};
  std::atomic<bool> too_early{false};
  future->attach(call(
      [&](Future&) {
        too_early = !all_finished;
        ran.send();
      },
      Continuation::when_ready));
  for (int i : {2, 0, 1}) {
    all_finished = i == 1;
    accelerator.finish(stream(i, 0));
  }
  ran.wait();
  CHECK_FALSE(too_early);
}

TEST_CASE_FIXTURE(WatcherRules, "a future without pending device work is not watched") {
  const auto before = Watcher::get().statistics().watched;
  int ran = 0;
  const auto count = [&](Future&) { ++ran; };
  completed()->attach(call(count, Continuation::when_ready));
  completed(EventSet::record(device(1)))->attach(call(count, Continuation::when_ready));
  CHECK(ran == 2);
  CHECK(Watcher::get().statistics().watched == before);
}

TEST_CASE_FIXTURE(WatcherRules, "a callback attached to a pending future is watched from completion on") {
  const FuturePtr future = pending();
  Signal ran;
  future->attach(call([&](Future&) { ran.send(); }, Continuation::when_ready));
  CHECK(Watcher::get().statistics().pending == 0);
  accelerator.launch(stream(0, 0));
  future->complete({}, EventSet::record(device(0)));
  CHECK(Watcher::get().statistics().pending == 1);
  accelerator.finish_all();
  ran.wait();
}

TEST_CASE_FIXTURE(WatcherRules, "the watcher posts foreign callbacks to their executor") {
  struct RecordingExecutor final : Executor {
    void post(Continuation* c) noexcept override {
      posted = true;
      CallbackThread::get().post(c);
    }
    std::atomic<bool> posted{false};
  } executor;
  constexpr auto flags = static_cast<std::uint8_t>(Continuation::foreign | Continuation::when_ready);
  Executor* chosen = nullptr;
  SUBCASE("without an executor") {}
  SUBCASE("with an executor") { chosen = &executor; }
  const FuturePtr future = busy();
  Signal ran;
  future->attach(call(
      [&](Future&) {
        CHECK(CallbackThread::get().is_current());
        ran.send();
      },
      flags, chosen));
  accelerator.finish_all();
  ran.wait();
  CHECK(executor.posted == (chosen != nullptr));
}

TEST_CASE_FIXTURE(WatcherRules, "a failed query becomes the late error, and the callback runs") {
  const FuturePtr bad = busy(0);
  const FuturePtr good = busy(1);
  Signal bad_ran;
  Signal good_ran;
  bad->attach(call([&](Future&) { bad_ran.send(); }, Continuation::when_ready));
  good->attach(call([&](Future&) { good_ran.send(); }, Continuation::when_ready));
  accelerator.fail_queries(device(0));
  bad_ran.wait();
  CHECK_FALSE(good_ran.sent());
  accelerator.finish_all();
  good_ran.wait();
  CHECK(bad->state() == State::completed);  // a late error changes no state
  CHECK(good->late_error() == nullptr);
  REQUIRE(bad->late_error() != nullptr);
  CHECK_THROWS_AS(std::rethrow_exception(bad->late_error()), DeviceFailure);
}

TEST_CASE_FIXTURE(WatcherRules, "the name can be read while the watcher sets an error") {
  for (int round = 0; round < 50; ++round) {
    const FuturePtr future = busy();
    std::atomic<bool> ran{false};
    future->attach(call([&](Future&) { ran = true; }, Continuation::when_ready));
    accelerator.fail_queries(device(0));
    while (!ran) CHECK(future->name().empty());
    accelerator.reset();
  }
}

TEST_CASE_FIXTURE(WatcherRules, "a failed future is watched too") {
  accelerator.launch(stream(0, 0));
  const FuturePtr failed = pending();
  failed->mark_seen();
  failed->fail(Value::of_error(nullptr), EventSet::record(device(0)));
  Signal ran;
  failed->attach(call([&](Future&) { ran.send(); }, Continuation::when_ready));
  CHECK(Watcher::get().statistics().pending == 1);
  accelerator.finish_all();
  ran.wait();
}

TEST_CASE_FIXTURE(WatcherRules, "callbacks keep their order between two queries of the watcher") {
  const FuturePtr future = pending();
  Signal both_ran;
  std::vector<int> order;
  std::mutex mutex;
  const auto mark = [&](int i) {
    return [&, i](Future&) {
      std::lock_guard lock(mutex);
      order.push_back(i);
      if (order.size() == 2) both_ran.send();
    };
  };
  SUBCASE("queries of the completing thread") {
    Signal completed_all;
    accelerator.after_query([&, here = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == here) {
        accelerator.finish_all();
      } else {
        completed_all.wait();
      }
    });
    accelerator.launch(stream(0, 0));
    future->attach(call(mark(1), Continuation::when_ready));
    future->attach(call(mark(2), Continuation::when_ready));
    future->complete({}, EventSet::record(device(0)));
    completed_all.send();
    both_ran.wait();
    settle_watcher();
  }
  SUBCASE("queries of the watcher") {
    Watcher watcher;
    watcher.set_pauses(0us, 0us);
    Signal queried;
    Signal both_watched;
    accelerator.after_query([&, queries = std::make_shared<std::atomic<int>>(0)] {
      switch (++*queries) {
        case 1:  // the round with one callback
          queried.send();
          both_watched.wait();
          break;
        case 2:  // the first query of the round with two callbacks
          accelerator.finish_all();
          break;
      }
    });
    const FuturePtr parent = busy();
    watcher.watch(watched(parent, mark(1)));
    queried.wait();
    watcher.watch(watched(parent, mark(2)));
    both_watched.send();
    both_ran.wait();
    watcher.stop();
  }
  CHECK(order == std::vector{1, 2});
}

TEST_CASE_FIXTURE(WatcherRules, "the watcher queries the device without any lock") {
  Watcher watcher;
  const FuturePtr future = busy();
  accelerator.after_query([&] {
    watcher.statistics();
    EventPool::get().statistics();
    CHECK(future->late_error() == nullptr);
    accelerator.finish_all();
  });
  Signal ran;
  watcher.watch(watched(future, [&](Future&) { ran.send(); }));
  ran.wait();
  watcher.stop();
}

TEST_CASE_FIXTURE(WatcherRules, "the watcher keeps a watched future alive, and releases it afterwards") {
  Watcher watcher;
  Signal ran;
  bool destroyed = false;
  {
    accelerator.launch(stream(0, 0));
    const FuturePtr future = pending();
    future->complete(Value::of_object(object([&] { destroyed = true; })), EventSet::record(device(0)));
    watcher.watch(watched(future, [&](Future&) { ran.send(); }));
  }
  CHECK_FALSE(destroyed);
  accelerator.finish_all();
  ran.wait();
  watcher.stop();
  settle_callback_thread();
  CHECK(destroyed);
}

TEST_CASE_FIXTURE(WatcherRules, "each event is queried with its own device current") {
  const FuturePtr future = busy(2);
  Signal ran;
  future->attach(call([&](Future&) { ran.send(); }, Continuation::when_ready));
  accelerator.finish_all();
  ran.wait();
  const auto queries = accelerator.notes(Call::query);
  CHECK_FALSE(queries.empty());
  for (const Note& query : queries) {
    CHECK(query.device == 2);
    CHECK(query.current == 2);
  }
}

TEST_CASE_FIXTURE(WatcherRules, "many threads watch futures while devices finish, and each callback runs once") {
  constexpr int kThreads = 4;
  constexpr int kEach = 200;
  std::atomic<int> ran{0};
  std::latch all_ran(kThreads * kEach);
  together(kThreads, [&](int thread) {
    EngineThread engine;
    for (int i = 0; i < kEach; ++i) {
      const FuturePtr future = pending();
      const auto flags = i % 2 == 0 ? Continuation::when_ready : Continuation::when_ready | Continuation::foreign;
      future->attach(call(
          [&](Future&) {
            ++ran;
            all_ran.count_down();
          },
          static_cast<std::uint8_t>(flags)));
      const c10::Stream on = stream(thread % kDevices, thread);
      accelerator.launch(on);
      future->complete({}, EventSet::record(on.device(), on));
      if (i % 3 == 0) accelerator.finish(on);
    }
    accelerator.finish_all();
  });
  accelerator.finish_all();
  all_ran.wait();
  CHECK(ran == kThreads * kEach);
}

TEST_CASE_FIXTURE(WatcherRules, "the watcher's thread has a name") {
  Signal ran;
  std::string name(16, '\0');
  const FuturePtr future = busy();
  future->attach(call(
      [&](Future&) {
        pthread_getname_np(pthread_self(), name.data(), name.size());
        ran.send();
      },
      Continuation::when_ready));
  accelerator.finish_all();
  ran.wait();
  CHECK(std::string(name.c_str()).starts_with("cudafuture-"));
}

TEST_SUITE_END();
