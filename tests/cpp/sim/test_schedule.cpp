// When work runs under each schedule, and in what order.
#include <set>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

// Runs four streams of five pieces of work each, of which some wait for others, and returns the order.
Journal order_of(Schedule schedule, std::uint64_t seed) {
  Journal journal;
  const Bench bench(schedule, seed);
  const StreamName streams[] = {kDefault, Bench::stream(), Bench::stream(), Bench::stream()};
  for (int i = 0; i < 5; ++i) {
    for (int s = 0; s < 4; ++s) {
      Bench::work(streams[s], [&journal, s, i] { journal.push_back(10 * s + i); });
    }
    Bench::order(streams[i % 4], streams[(i + 1) % 4]);
  }
  bench->synchronize(0);
  CHECK(journal.size() == 20);
  return journal;
}

}  // namespace

TEST_SUITE_BEGIN("schedule");

TEST_CASE("free: work runs when it is submitted") {
  const Bench bench(Schedule::free);
  bool ran = false;
  Bench::work(kDefault, [&] { ran = true; });
  CHECK(ran);
  CHECK(bench->query(kDefault));
}

TEST_CASE("lazy: nothing runs until somebody waits") {
  const Bench bench(Schedule::lazy);
  Journal journal;
  for (int i = 0; i < 3; ++i) Bench::work(kDefault, [&, i] { journal.push_back(i); });
  bench->record(kDefault);
  CHECK(journal.empty());
  bench->synchronize(kDefault);
  CHECK(journal == Journal{0, 1, 2});
}

TEST_CASE("lazy: a wait runs only what it needs") {
  const Bench bench(Schedule::lazy);
  const StreamName a = Bench::stream();
  const StreamName b = Bench::stream();
  const StreamName c = Bench::stream();
  Journal journal;
  const auto note = [&](StreamName stream, int what) { Bench::work(stream, [&, what] { journal.push_back(what); }); };
  note(a, 1);
  Bench::order(b, a);
  note(a, 2);  // after the event
  note(b, 3);
  const RecordingPtr wanted = bench->record(b);
  note(b, 4);
  note(c, 5);
  bench->synchronize(wanted);
  CHECK(journal == Journal{1, 3});
  bench->synchronize(0);
  CHECK(std::set<int>(journal.begin(), journal.end()).size() == 5);
}

TEST_CASE("lazy: a wait runs through long chains of streams that wait for each other") {
  const Bench bench(Schedule::lazy);
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

TEST_CASE("lazy: a query answers before it runs anything, and the next one says yes") {
  const Bench bench(Schedule::lazy);
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

TEST_CASE("a loop that polls comes to an end under every schedule") {
  for (const Schedule schedule : kSchedules) {
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
      CHECK(polls <= 23);  // each runs at least one of the 22 items
    }
  }
}

TEST_CASE("the same seed gives the same order, and seeds differ") {
  for (const Schedule schedule : kSchedules) {
    std::set<Journal> orders;
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      const Journal order = order_of(schedule, seed);
      CHECK(order == order_of(schedule, seed));
      orders.insert(order);
    }
    CHECK((schedule == Schedule::free ? orders.size() == 1 : orders.size() > 10));
  }
}

TEST_CASE("jitter: some work runs before anybody waits, and some does not") {
  int early = 0;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Bench bench(Schedule::jitter, seed);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    early += ran ? 1 : 0;
  }
  CHECK(early > 10);
  CHECK(early < 50);
}

TEST_CASE("work of one stream runs in the order of its submission") {
  for (const Schedule schedule : kSchedules) {
    const Journal order = order_of(schedule, 7);
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

TEST_CASE("work that submits only enqueues") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    Journal journal;
    const StreamName other = Bench::stream();
    Bench::work(kDefault, [&] {
      Bench::work(other, [&] { journal.push_back(2); });
      Bench::work(kDefault, [&] { journal.push_back(3); });
      CHECK_FALSE(bench->query(other));
      journal.push_back(1);
    });
    bench->synchronize(0);
    bench->synchronize(0);  // what the work submitted
    CHECK(journal.size() == 3);
    CHECK(journal[0] == 1);
  }
}

TEST_CASE("work that waits fails") {
  const Bench bench(Schedule::lazy);
  const StreamName other = Bench::stream();
  Bench::work(other, [] {});
  Bench::work(kDefault, [&] { bench->synchronize(other); });
  CHECK_THROWS_AS(bench->synchronize(kDefault), std::logic_error);
}

TEST_CASE("every run goes through the run hook") {
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
