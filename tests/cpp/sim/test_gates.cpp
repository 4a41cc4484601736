// Gates: work behind a closed gate does not run, and a thread that waits for it sleeps until another thread opens it.
#include <atomic>
#include <latch>
#include <thread>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

std::latch* asleep = nullptr;
std::atomic<int> woken{0};

// State of the tests with a check, which use one thread.
struct Interruption {};
int sleeps = 0;
int checks = 0;
GatePtr closed_gate;

class CheckHooks {
 public:
  explicit CheckHooks(void (*check)()) {
    sleeps = checks = woken = 0;
    Bench::sim().set_sleep_hooks(
        []() -> void* {
          ++sleeps;
          return &woken;
        },
        [](void* token) { ++*static_cast<std::atomic<int>*>(token); }, check);
  }
  ~CheckHooks() {
    Bench::sim().set_sleep_hooks(nullptr, nullptr);
    closed_gate = nullptr;
  }
};

}  // namespace

TEST_SUITE_BEGIN("gates");

TEST_CASE("work behind a closed gate does not run under any schedule") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    const StreamName waits = Bench::stream();
    Order order;
    const GatePtr gate = bench->hold(kDefault);
    Bench::work(kDefault, [&] { order.push_back(1); });
    Bench::order(waits, kDefault);
    Bench::work(waits, [&] { order.push_back(2); });
    for (int i = 0; i < 10; ++i) CHECK_FALSE(bench->query(waits));
    CHECK(order.empty());
    bench->open(gate);
    bench->synchronize(waits);
    CHECK(order == Order{1, 2});
  }
}

TEST_CASE("free: opening a gate runs the work behind it") {
  const Bench bench(WorkSchedule::free);
  bool ran = false;
  const GatePtr gate = bench->hold(kDefault);
  Bench::work(kDefault, [&] { ran = true; });
  bench->open(gate);
  CHECK(ran);
  bench->open(gate);  // no effect: the gate is open
  bench->open(nullptr);
}

TEST_CASE("a stream stops at each of its gates") {
  const Bench bench(WorkSchedule::free);
  Order order;
  const GatePtr first = bench->hold(kDefault);
  Bench::work(kDefault, [&] { order.push_back(1); });
  const GatePtr second = bench->hold(kDefault);
  Bench::work(kDefault, [&] { order.push_back(2); });
  bench->open(second);
  CHECK(order.empty());
  bench->open(first);
  CHECK(order == Order{1, 2});
}

TEST_CASE("a thread behind a gate sleeps between hooks until it opens") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    std::latch sleeps(1);
    asleep = &sleeps;
    woken = 0;
    bench->set_sleep_hooks(
        []() -> void* {
          if (!asleep->try_wait()) asleep->count_down();
          return &woken;
        },
        [](void* token) { ++*static_cast<std::atomic<int>*>(token); });
    const GatePtr gate = bench->hold(kDefault);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    std::thread waiter([&] {
      bench->synchronize(kDefault);
      CHECK(ran);
    });
    sleeps.wait();
    CHECK_FALSE(bench->query(kDefault));
    bench->open(gate);
    waiter.join();
    bench->set_sleep_hooks(nullptr, nullptr);
    CHECK(woken >= 1);
  }
}

TEST_CASE("a check that throws ends the wait, which can be repeated") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    const CheckHooks check([] { throw Interruption{}; });
    const GatePtr gate = bench->hold(kDefault);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    for (int i = 1; i <= 2; ++i) {
      CHECK_THROWS_AS(bench->synchronize(kDefault), Interruption);
      CHECK(sleeps == i);
      CHECK(woken == i);
    }
    CHECK_FALSE(ran);
    CHECK_FALSE(bench->query(kDefault));
    bench->open(gate);
    bench->synchronize(kDefault);
    CHECK(ran);
  }
}

TEST_CASE("a check that returns continues the wait, and may call the accelerator") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    const CheckHooks check([] {
      CHECK_FALSE(Bench::sim().query(kDefault));
      if (++checks == 3) Bench::sim().open(closed_gate);
    });
    closed_gate = bench->hold(kDefault);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    bench->synchronize(kDefault);
    CHECK(ran);
    CHECK(checks == 3);
    CHECK(woken == sleeps);
  }
}

TEST_CASE("other work does not delay the check of a wait") {
  const Bench bench(WorkSchedule::free);
  const CheckHooks check([] { throw Interruption{}; });
  const GatePtr gate = bench->hold(kDefault);
  Bench::work(kDefault, [] {});
  std::atomic<bool> ended{false};
  std::thread busy([&] {
    while (!ended) Bench::work(Bench::stream(), [] {});
  });
  CHECK_THROWS_AS(bench->synchronize(kDefault), Interruption);
  ended = true;
  busy.join();
  bench->open(gate);
}

TEST_SUITE_END();
