// The watcher's thread: when it polls, how long it pauses, and how it stops.
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "callback.h"
#include "core/watcher.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"
#include "watcher_rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;
using namespace std::chrono_literals;

TEST_SUITE_BEGIN("watcher_thread");

TEST_CASE_FIXTURE(WatcherRules, "the watcher polls once per round, and never while nothing is watched") {
  Watcher watcher;
  watcher.set_pauses(0us, 0us);
  std::uint64_t polls = 0;
  for (int queries = 1; queries <= 20; ++queries) {
    const FuturePtr future = busy();
    std::atomic<int> left{queries};
    accelerator.after_query([&] {
      if (--left == 1) accelerator.finish_all();
    });
    if (queries == 1) accelerator.finish_all();
    Signal ran;
    watcher.watch(watched(future, [&](Future&) { ran.send(); }));
    ran.wait();
    while (watcher.statistics().pending > 0) std::this_thread::yield();
    polls += static_cast<std::uint64_t>(queries);
    CHECK(watcher.statistics().polls == polls);
    // Give the watcher time for polls that it must not make.
    for (int i = 0; i < 2000; ++i) completed();
    CHECK(watcher.statistics().polls == polls);
  }
  CHECK(watcher.statistics().watched == 20);
  watcher.stop();
  CHECK(watcher.statistics().polls == polls);
}

TEST_CASE_FIXTURE(WatcherRules, "the watcher does not wake up while nothing is watched") {
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

TEST_CASE_FIXTURE(WatcherRules, "the watcher's pauses grow from the first to the longest") {
  constexpr auto kFirst = 200us;
  constexpr auto kLongest = 250us;
  Watcher watcher;
  watcher.set_pauses(kFirst, kLongest);
  std::vector<std::chrono::steady_clock::time_point> queries;
  accelerator.after_query([&] {
    queries.push_back(std::chrono::steady_clock::now());
    if (queries.size() == 8) accelerator.finish_all();
  });
  Signal ran;
  watcher.watch(watched(busy(), [&](Future&) { ran.send(); }));
  ran.wait();
  watcher.stop();
  REQUIRE(queries.size() == 9);
  Backoff expected(kFirst, kLongest);
  for (std::size_t i = 1; i < queries.size(); ++i) CHECK(queries[i] - queries[i - 1] >= expected.next());
  CHECK(expected.next() == kLongest);
}

TEST_CASE_FIXTURE(WatcherRules, "a future that is added during a pause ends the pause") {
  Watcher watcher;
  watcher.set_pauses(1h, 1h);
  Signal queried;
  Signal first_ran;
  Signal second_ran;
  accelerator.after_query(
      [&, once = std::make_shared<std::once_flag>()] { std::call_once(*once, [&] { queried.send(); }); });
  const FuturePtr first = busy();
  watcher.watch(watched(first, [&](Future&) { first_ran.send(); }));
  queried.wait();
  accelerator.finish_all();
  watcher.watch(watched(completed(EventSet::record(device(1))), [&](Future&) { second_ran.send(); }));
  first_ran.wait();
  second_ran.wait();
  watcher.stop();
}

TEST_CASE_FIXTURE(WatcherRules, "stop() interrupts a pause, runs due callbacks and abandons the others") {
  Watcher watcher;
  watcher.set_pauses(1h, 1h);
  Signal queried;
  accelerator.after_query([&, queries = std::make_shared<std::atomic<int>>(0)] {
    if (++*queries == 2) queried.send();
  });
  const FuturePtr done_soon = busy(0);
  const FuturePtr never_done = busy(1);
  Signal ran;
  std::vector<int> abandoned;
  const auto expect_abandoned = [&](int number) {
    const auto late = [](Future&) { FAIL_CHECK("ran after stop()"); };
    auto* c = new Callback(late, Continuation::foreign, nullptr, [&, number] { abandoned.push_back(number); });
    c->parent = never_done;
    return c;
  };
  watcher.watch(expect_abandoned(1));
  watcher.watch(watched(done_soon, [&](Future&) { ran.send(); }));
  queried.wait();
  watcher.watch(expect_abandoned(2));
  accelerator.finish(stream(0, 0));
  watcher.stop();
  CHECK(ran.sent());
  settle_callback_thread();
  CHECK(abandoned == std::vector{1, 2});
  CHECK(watcher.statistics().pending == 0);
  const Inside inside;
  watcher.watch(expect_abandoned(3));
  CHECK(abandoned.size() == 3);
}

TEST_CASE_FIXTURE(WatcherRules, "stop() leaves the thread of a device that does not answer") {
  static auto* const watcher = new Watcher;  // its thread outlives stop()
  Signal query_began;
  Signal may_return;
  accelerator.after_query([&, once = std::make_shared<std::once_flag>()] {
    std::call_once(*once, [&] {
      query_began.send();
      may_return.wait();
    });
  });
  watcher->watch(watched(busy(), [](Future&) { FAIL_CHECK("ran after stop()"); }));
  query_began.wait();
  static int patience;
  patience = 2;
  watcher->stop([]() noexcept { return --patience > 0; });
  CHECK(patience == 0);
  CHECK(watcher->statistics().pending == 1);
  may_return.send();
  while (watcher->statistics().pending > 0) std::this_thread::yield();
}

TEST_SUITE_END();
