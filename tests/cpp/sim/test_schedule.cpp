// Schedules: the time and the order in which work runs under each of them.
#include <set>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

// Run four streams with five work items each, some of which wait for others, and return the order in which they ran.
Order order_of(WorkSchedule schedule, std::uint64_t seed) {
  Order ran_order;
  const Bench bench(schedule, seed);
  const StreamName streams[] = {kDefault, Bench::stream(), Bench::stream(), Bench::stream()};
  for (int i = 0; i < 5; ++i) {
    for (int s = 0; s < 4; ++s) {
      Bench::work(streams[s], [&ran_order, s, i] { ran_order.push_back(10 * s + i); });
    }
    Bench::order(streams[i % 4], streams[(i + 1) % 4]);
  }
  bench->synchronize(0);
  CHECK(ran_order.size() == 20);
  return ran_order;
}

}  // namespace

TEST_SUITE_BEGIN("schedule");

TEST_CASE("free: work runs when it is submitted") {
  const Bench bench(WorkSchedule::free);
  bool ran = false;
  Bench::work(kDefault, [&] { ran = true; });
  CHECK(ran);
  CHECK(bench->query(kDefault));
}

TEST_CASE("lazy: no work runs before a wait") {
  const Bench bench(WorkSchedule::lazy);
  Order ran_order;
  for (int i = 0; i < 3; ++i) Bench::work(kDefault, [&, i] { ran_order.push_back(i); });
  bench->record(kDefault);
  CHECK(ran_order.empty());
  bench->synchronize(kDefault);
  CHECK(ran_order == Order{0, 1, 2});
}

TEST_CASE("lazy: a wait runs only the work that it needs") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName a = Bench::stream();
  const StreamName b = Bench::stream();
  const StreamName c = Bench::stream();
  Order ran_order;
  const auto note = [&](StreamName stream, int number) {
    Bench::work(stream, [&, number] { ran_order.push_back(number); });
  };
  note(a, 1);
  Bench::order(b, a);
  note(a, 2);  // after the event that b waits for
  note(b, 3);
  const RecordingPtr awaited = bench->record(b);
  note(b, 4);
  note(c, 5);
  bench->synchronize(awaited);
  CHECK(ran_order == Order{1, 3});
  bench->synchronize(0);
  CHECK(std::set<int>(ran_order.begin(), ran_order.end()).size() == 5);
}

TEST_CASE("lazy: a wait runs a long chain across two streams") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName a = Bench::stream(0);
  const StreamName b = Bench::stream(1);
  int steps = 0;
  for (int i = 0; i < 20000; ++i) {
    Bench::work(i % 2 == 0 ? a : b, [&, i] { CHECK(steps++ == i); });
    Bench::order(i % 2 == 0 ? b : a, i % 2 == 0 ? a : b);
  }
  bench->synchronize(b);
  CHECK(steps == 20000);
}

TEST_CASE("lazy: a query returns the state and then runs work") {
  const Bench bench(WorkSchedule::lazy);
  bool other = false;
  const StreamName unrelated = Bench::stream();
  Bench::work(unrelated, [&] { other = true; });
  Bench::work(kDefault, [] {});
  Bench::work(kDefault, [] {});
  const RecordingPtr recording = bench->record(kDefault);
  CHECK_FALSE(bench->query(recording));
  CHECK(bench->query(recording));
  CHECK_FALSE(other);
}

TEST_CASE("a polling loop ends under every schedule") {
  for (const WorkSchedule schedule : kSchedules) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const Bench bench(schedule, seed);
      const StreamName other = Bench::stream();
      for (int i = 0; i < 10; ++i) {
        Bench::work(other, [] {});
        Bench::work(kDefault, [] {});
      }
      Bench::order(kDefault, other);
      Bench::work(kDefault, [] {});
      const RecordingPtr recording = bench->record(kDefault);
      int polls = 1;
      while (!bench->query(recording)) ++polls;
      CHECK(polls <= 23);  // each poll runs at least one of the 22 items
    }
  }
}

TEST_CASE("a seed determines the order, and different seeds give different orders") {
  for (const WorkSchedule schedule : kSchedules) {
    std::set<Order> orders;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const Order order = order_of(schedule, seed);
      CHECK(order == order_of(schedule, seed));
      orders.insert(order);
    }
    CHECK((schedule == WorkSchedule::free ? orders.size() == 1 : orders.size() > 10));
  }
}

TEST_CASE("jitter: some work runs before a wait, and some does not") {
  int early = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Bench bench(WorkSchedule::jitter, seed);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    early += ran ? 1 : 0;
  }
  CHECK(early > 10);
  CHECK(early < 50);
}

TEST_CASE("work of one stream runs in submission order") {
  for (const WorkSchedule schedule : kSchedules) {
    const Order order = order_of(schedule, 7);
    for (int s = 0; s < 4; ++s) {
      int last = -1;
      for (const int step : order) {
        if (step / 10 != s) continue;
        CHECK(step % 10 == last + 1);
        last = step % 10;
      }
    }
  }
}

TEST_CASE("work that is submitted inside other work runs after it") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    Order ran_order;
    const StreamName other = Bench::stream();
    Bench::work(kDefault, [&] {
      Bench::work(other, [&] { ran_order.push_back(2); });
      Bench::work(kDefault, [&] { ran_order.push_back(3); });
      CHECK_FALSE(bench->query(other));
      ran_order.push_back(1);
    });
    bench->synchronize(0);
    bench->synchronize(0);  // waits for the work that the first item submitted
    CHECK(ran_order.size() == 3);
    CHECK(ran_order[0] == 1);
  }
}

TEST_CASE("work that synchronizes fails") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName other = Bench::stream();
  Bench::work(other, [] {});
  Bench::work(kDefault, [&] { bench->synchronize(other); });
  CHECK_THROWS_AS(bench->synchronize(kDefault), std::logic_error);
}

TEST_CASE("the run hook runs all work") {
  const Bench bench;
  static int runs;
  runs = 0;
  bench->set_run_hook([](const std::function<void()>& run) {
    ++runs;
    run();
  });
  bool ran = false;
  Bench::work(kDefault, [&] { ran = true; });
  bench->set_run_hook(nullptr);
  CHECK(ran);
  CHECK(runs == 1);
}

TEST_SUITE_END();
