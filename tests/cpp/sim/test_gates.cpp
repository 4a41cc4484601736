// Gates: what is behind one does not run, and who waits for it sleeps until another thread opens it.
#include <atomic>
#include <latch>
#include <thread>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

std::latch* asleep = nullptr;
std::atomic<int> woken{0};

// Of the tests with a check: everything happens in one thread.
struct Interruption {};
int sleeps = 0;
int checks = 0;
GatePtr closed;

class WithCheck {
 public:
  explicit WithCheck(void (*check)()) {
    sleeps = checks = woken = 0;
    Bench::sim().set_sleep_hooks(
        []() -> void* {
          ++sleeps;
          return &woken;
        },
        [](void* token) { ++*static_cast<std::atomic<int>*>(token); }, check);
  }
  ~WithCheck() {
    Bench::sim().set_sleep_hooks(nullptr, nullptr);
    closed = nullptr;
  }
};

}  // namespace

TEST_SUITE_BEGIN("gates");

TEST_CASE("nothing behind a closed gate runs, under any schedule") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    const StreamName waits = Bench::stream();
    Journal journal;
    const GatePtr gate = bench->hold(kDefault);
    Bench::work(kDefault, [&] { journal.push_back(1); });
    Bench::order(waits, kDefault);
    Bench::work(waits, [&] { journal.push_back(2); });
    for (int i = 0; i < 10; ++i) CHECK_FALSE(bench->query(waits));
    CHECK(journal.empty());
    bench->open(gate);
    bench->synchronize(waits);
    CHECK(journal == Journal{1, 2});
  }
}

TEST_CASE("free: opening a gate runs what was behind it") {
  const Bench bench(Schedule::free);
  bool ran = false;
  const GatePtr gate = bench->hold(kDefault);
  Bench::work(kDefault, [&] { ran = true; });
  bench->open(gate);
  CHECK(ran);
  bench->open(gate);  // again
  bench->open(nullptr);
}

TEST_CASE("a stream stops at each of its gates") {
  const Bench bench(Schedule::free);
  Journal journal;
  const GatePtr first = bench->hold(kDefault);
  Bench::work(kDefault, [&] { journal.push_back(1); });
  const GatePtr second = bench->hold(kDefault);
  Bench::work(kDefault, [&] { journal.push_back(2); });
  bench->open(second);
  CHECK(journal.empty());
  bench->open(first);
  CHECK(journal == Journal{1, 2});
}

TEST_CASE("who synchronizes behind a gate sleeps, with the hooks around, until it opens") {
  for (const Schedule schedule : kSchedules) {
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

TEST_CASE("a check that throws ends the wait, which may be begun again") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    const WithCheck check([] { throw Interruption{}; });
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

TEST_CASE("a check that returns lets the wait go on, and may call the accelerator") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    const WithCheck check([] {
      CHECK_FALSE(Bench::sim().query(kDefault));
      if (++checks == 3) Bench::sim().open(closed);
    });
    closed = bench->hold(kDefault);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    bench->synchronize(kDefault);
    CHECK(ran);
    CHECK(checks == 3);
    CHECK(woken == sleeps);
  }
}

TEST_CASE("changes that do not help a wait do not put its check off") {
  const Bench bench(Schedule::free);
  const WithCheck check([] { throw Interruption{}; });
  const GatePtr gate = bench->hold(kDefault);
  Bench::work(kDefault, [] {});
  std::atomic<bool> over{false};
  std::thread busy([&] {
    while (!over) Bench::work(Bench::stream(), [] {});
  });
  CHECK_THROWS_AS(bench->synchronize(kDefault), Interruption);
  over = true;
  busy.join();
  bench->open(gate);
}

TEST_SUITE_END();
