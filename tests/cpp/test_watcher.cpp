// The thread that watches device events: it polls only while somebody waits, less and less often, and never enters the
// runtime.
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

using namespace cudafuture;
using namespace cudafuture::fake;
using namespace std::chrono_literals;

namespace {

// A completed future behind whose event there is work that has not finished.
FuturePtr busy(int device_index = 0) {
  accelerator.launch(stream(device_index, 0));
  return completed(EventSet::record(device(device_index)));
}

// Not yet handed to a watcher, but as the core hands it over.
Callback* watched(const FuturePtr& parent, Callback::Run run) {
  Callback* c = call(std::move(run));
  c->parent = parent;
  return c;
}

// The watcher of the process counts as an engine from here on: it may never enter the runtime.
struct WatcherRules : Rules, FreshAccelerator {
  WatcherRules() {
    Signal ran;
    const FuturePtr future = busy();
    future->attach(call(
        [&](Future&) {
          EngineThread::for_good();
          ran.send();
        },
        Continuation::when_ready));
    accelerator.finish_all();
    ran.wait();
    settle_watcher();
    accelerator.reset();
  }
};

}  // namespace

TEST_SUITE_BEGIN("watcher");

TEST_CASE_FIXTURE(WatcherRules, "a callback that wants the device finished runs when it has, on the watcher") {
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

TEST_CASE_FIXTURE(WatcherRules, "it runs no sooner than the last of several devices") {
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

TEST_CASE_FIXTURE(WatcherRules, "nothing is watched when the device has finished already, or there is none") {
  const auto before = Watcher::get().statistics().watched;
  int ran = 0;
  const auto count = [&](Future&) { ++ran; };
  completed()->attach(call(count, Continuation::when_ready));
  completed(EventSet::record(device(1)))->attach(call(count, Continuation::when_ready));
  CHECK(ran == 2);
  CHECK(Watcher::get().statistics().watched == before);
}

TEST_CASE_FIXTURE(WatcherRules, "a callback attached before completion is watched from completion on") {
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

TEST_CASE_FIXTURE(WatcherRules, "foreign callbacks that it finds due run on the callback thread, or their executor") {
  struct Noting final : Executor {
    void post(Continuation* c) noexcept override {
      posted = true;
      CallbackThread::get().post(c);
    }
    std::atomic<bool> posted{false};
  } executor;
  constexpr auto flags = static_cast<std::uint8_t>(Continuation::foreign | Continuation::when_ready);
  Executor* named = nullptr;
  SUBCASE("without an executor") {}
  SUBCASE("with one") { named = &executor; }
  const FuturePtr future = busy();
  Signal ran;
  future->attach(call(
      [&](Future&) {
        CHECK(CallbackThread::get().is_current());
        ran.send();
      },
      flags, named));
  accelerator.finish_all();
  ran.wait();
  CHECK(executor.posted == (named != nullptr));
}

TEST_CASE_FIXTURE(WatcherRules, "a query that fails becomes the late error, and the callback runs all the same") {
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

TEST_CASE_FIXTURE(WatcherRules, "the facts of a future can be read while the watcher finds its late error") {
  for (int round = 0; round < 50; ++round) {
    const FuturePtr future = busy();
    std::atomic<bool> ran{false};
    future->attach(call([&](Future&) { ran = true; }, Continuation::when_ready));
    accelerator.fail_queries(device(0));
    while (!ran) CHECK(future->name().empty());
    accelerator.reset();
  }
}

TEST_CASE_FIXTURE(WatcherRules, "a failed or cancelled future is watched like any other") {
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

TEST_CASE_FIXTURE(WatcherRules, "callbacks of one future keep their order when the device finishes between two looks") {
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
  SUBCASE("of the completing thread") {
    Signal handed_out;
    accelerator.after_query([&, here = std::this_thread::get_id()] {
      if (std::this_thread::get_id() == here) {
        accelerator.finish_all();
      } else {
        handed_out.wait();
      }
    });
    accelerator.launch(stream(0, 0));
    future->attach(call(mark(1), Continuation::when_ready));
    future->attach(call(mark(2), Continuation::when_ready));
    future->complete({}, EventSet::record(device(0)));
    handed_out.send();
    both_ran.wait();
    settle_watcher();
  }
  SUBCASE("of the watcher") {
    Watcher watcher;
    watcher.set_pauses(0us, 0us);
    Signal looked;
    Signal both_watched;
    accelerator.after_query([&, looks = std::make_shared<std::atomic<int>>(0)] {
      switch (++*looks) {
        case 1:  // alone
          looked.send();
          both_watched.wait();
          break;
        case 2:  // the first of a round of two
          accelerator.finish_all();
          break;
      }
    });
    const FuturePtr one = busy();
    watcher.watch(watched(one, mark(1)));
    looked.wait();
    watcher.watch(watched(one, mark(2)));
    both_watched.send();
    both_ran.wait();
    watcher.stop();
  }
  CHECK(order == std::vector{1, 2});
}

TEST_CASE_FIXTURE(WatcherRules, "it polls once for each round, and not at all while nothing is watched") {
  Watcher watcher;
  watcher.set_pauses(0us, 0us);
  std::uint64_t polls = 0;
  for (int looks = 1; looks <= 20; ++looks) {
    const FuturePtr future = busy();
    std::atomic<int> left{looks};
    accelerator.after_query([&] {
      if (--left == 1) accelerator.finish_all();
    });
    if (looks == 1) accelerator.finish_all();
    Signal ran;
    watcher.watch(watched(future, [&](Future&) { ran.send(); }));
    ran.wait();
    while (watcher.statistics().pending > 0) std::this_thread::yield();
    polls += static_cast<std::uint64_t>(looks);
    CHECK(watcher.statistics().polls == polls);
    // Work for this thread, time for the watcher to do what it should not.
    for (int i = 0; i < 2000; ++i) completed();
    CHECK(watcher.statistics().polls == polls);
  }
  CHECK(watcher.statistics().watched == 20);
  watcher.stop();
  CHECK(watcher.statistics().polls == polls);
}

TEST_CASE_FIXTURE(WatcherRules, "it does not wake up while nothing is watched") {
  Watcher watcher;
  const auto watch_one = [&] {
    accelerator.finish_all();
    Signal ran;
    watcher.watch(watched(completed(EventSet::record(device(0))), [&](Future&) { ran.send(); }));
    ran.wait();
    while (watcher.statistics().pending > 0) std::this_thread::yield();
  };
  watch_one();
  const std::uint64_t before = watcher.statistics().wakeups;
  for (int i = 0; i < 20'000; ++i) completed(EventSet::record(device(1)));
  CHECK(watcher.statistics().wakeups == before);
  watch_one();
  CHECK(watcher.statistics().wakeups > before);
  watcher.stop();
}

TEST_CASE_FIXTURE(WatcherRules, "the pauses grow from the first to the longest") {
  constexpr auto kFirst = 200us;
  constexpr auto kLongest = 250us;
  Watcher watcher;
  watcher.set_pauses(kFirst, kLongest);
  std::vector<std::chrono::steady_clock::time_point> looks;
  accelerator.after_query([&] {
    looks.push_back(std::chrono::steady_clock::now());
    if (looks.size() == 8) accelerator.finish_all();
  });
  Signal ran;
  watcher.watch(watched(busy(), [&](Future&) { ran.send(); }));
  ran.wait();
  watcher.stop();
  REQUIRE(looks.size() == 9);
  Backoff expected(kFirst, kLongest);
  for (std::size_t i = 1; i < looks.size(); ++i) CHECK(looks[i] - looks[i - 1] >= expected.next());
  CHECK(expected.next() == kLongest);
}

TEST_CASE_FIXTURE(WatcherRules, "what comes during a pause is looked at without waiting for its end") {
  Watcher watcher;
  watcher.set_pauses(1h, 1h);
  Signal looked;
  Signal first_ran;
  Signal second_ran;
  accelerator.after_query(
      [&, once = std::make_shared<std::once_flag>()] { std::call_once(*once, [&] { looked.send(); }); });
  const FuturePtr first = busy();
  watcher.watch(watched(first, [&](Future&) { first_ran.send(); }));
  looked.wait();
  accelerator.finish_all();
  watcher.watch(watched(completed(EventSet::record(device(1))), [&](Future&) { second_ran.send(); }));
  first_ran.wait();
  second_ran.wait();
  watcher.stop();
}

TEST_CASE_FIXTURE(WatcherRules, "stop does not wait for a pause: what is due then runs, and the rest is abandoned") {
  Watcher watcher;
  watcher.set_pauses(1h, 1h);
  Signal looked;
  Signal last_looked;
  accelerator.after_query([&, looks = std::make_shared<std::atomic<int>>(0)] {
    if (++*looks == 2) looked.send();
  });
  const FuturePtr done_soon = busy(0);
  const FuturePtr never_done = busy(1);
  Signal ran;
  std::vector<int> abandoned;
  const auto doomed = [&](int number) {
    const auto late = [](Future&) { FAIL_CHECK("ran after stop()"); };
    auto* c = new Callback(late, Continuation::foreign, nullptr, [&, number] { abandoned.push_back(number); });
    c->parent = never_done;
    return c;
  };
  watcher.watch(doomed(1));
  watcher.watch(watched(done_soon, [&](Future&) { ran.send(); }));
  looked.wait();
  watcher.watch(doomed(2));
  accelerator.finish(stream(0, 0));
  watcher.stop();
  CHECK(ran.sent());
  settle_callback_thread();
  CHECK(abandoned == std::vector{1, 2});
  CHECK(watcher.statistics().pending == 0);
  const Inside inside;
  watcher.watch(doomed(3));
  CHECK(abandoned.size() == 3);
}

TEST_CASE_FIXTURE(WatcherRules, "stop leaves the thread to itself when a device does not answer and nobody goes on") {
  static auto* const watcher = new Watcher;  // its thread outlives stop()
  Signal asked;
  Signal answer;
  accelerator.after_query([&, once = std::make_shared<std::once_flag>()] {
    std::call_once(*once, [&] {
      asked.send();
      answer.wait();
    });
  });
  watcher->watch(watched(busy(), [](Future&) { FAIL_CHECK("ran after stop()"); }));
  asked.wait();
  static int patience;
  patience = 2;
  watcher->stop([]() noexcept { return --patience > 0; });
  CHECK(patience == 0);
  CHECK(watcher->statistics().pending == 1);
  answer.send();
  while (watcher->statistics().pending > 0) std::this_thread::yield();
}

TEST_CASE_FIXTURE(WatcherRules,
                  "no lock of the watcher, the future or the event pool is held while it asks the device") {
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

TEST_CASE_FIXTURE(WatcherRules, "it keeps what it watches alive, and lets go of it") {
  Watcher watcher;
  Signal ran;
  bool died = false;
  {
    accelerator.launch(stream(0, 0));
    const FuturePtr future = pending();
    future->complete(Value::of_object(object([&] { died = true; })), EventSet::record(device(0)));
    watcher.watch(watched(future, [&](Future&) { ran.send(); }));
  }
  CHECK_FALSE(died);
  accelerator.finish_all();
  ran.wait();
  watcher.stop();
  settle_callback_thread();
  CHECK(died);
}

TEST_CASE_FIXTURE(WatcherRules, "each event is queried under its own device") {
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

TEST_CASE_FIXTURE(WatcherRules, "many threads watch while the clock runs: each callback runs once") {
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

TEST_CASE_FIXTURE(WatcherRules, "the thread has a name that a debugger shows") {
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
