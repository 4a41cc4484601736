// Recordings: what a wait and a query mean, and what they order.
#include "bench.h"

using namespace sim;
using namespace sim::test;

TEST_SUITE_BEGIN("events");

TEST_CASE("a wait holds the recording that was current, whatever is recorded later") {
  const Bench bench(Schedule::lazy);
  const StreamName waits = Bench::stream();
  Journal journal;
  Bench::work(kDefault, [&] { journal.push_back(1); });
  RecordingPtr event = bench->record(kDefault);
  bench->wait(waits, event);
  Bench::work(waits, [&] { journal.push_back(2); });
  Bench::work(kDefault, [&] { journal.push_back(3); });
  event = bench->record(kDefault);  // recorded again
  bench->synchronize(waits);
  CHECK(journal == Journal{1, 2});
  CHECK_FALSE(bench->query(event));
}

TEST_CASE("an event that was never recorded is reached") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    CHECK(bench->query(RecordingPtr()));
    bench->synchronize(RecordingPtr());
    bench->wait(kDefault, nullptr);
    CHECK(bench->time_of(nullptr) == 0);
    CHECK(bench->query(kDefault));
  }
}

TEST_CASE("an event on an idle stream is reached") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    CHECK(bench->query(bench->record(kDefault)));
  }
}

TEST_CASE("a stream that waits for itself goes on") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    Bench::work(kDefault, [] {});
    Bench::order(kDefault, kDefault);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    bench->synchronize(kDefault);
    CHECK(ran);
  }
}

TEST_CASE("a wait orders streams of different devices") {
  for (const Schedule schedule : kSchedules) {
    const Bench bench(schedule);
    const StreamName other{1, 0};
    Journal journal;
    Bench::work(kDefault, [&] { journal.push_back(1); });
    Bench::order(other, kDefault);
    Bench::work(other, [&] { journal.push_back(2); });
    bench->synchronize(1);
    CHECK(journal == Journal{1, 2});
  }
}

TEST_CASE("synchronizing a device leaves the others alone") {
  const Bench bench(Schedule::lazy);
  Journal journal;
  const StreamName pooled = Bench::stream(0);
  Bench::work(kDefault, [&] { journal.push_back(0); });
  Bench::work(pooled, [&] { journal.push_back(0); });
  Bench::work({1, 0}, [&] { journal.push_back(1); });
  bench->synchronize(0);
  CHECK(journal == Journal{0, 0});
}

TEST_CASE("the pool hands streams out in turn, by priority") {
  const Bench bench;
  for (const int priority : {0, -1, -2, -3}) {
    const StreamName first = bench->new_stream(1, priority);
    for (int i = 1; i < kStreamsPerPriority; ++i) CHECK(bench->new_stream(1, priority).id == first.id + i);
    CHECK(bench->new_stream(1, priority) == first);
    CHECK(bench->priority_of(first) == priority);
    CHECK(bench->has_stream(first));
  }
  CHECK_THROWS_AS(bench->new_stream(0, 1), std::invalid_argument);  // as CUDA's pool does
  CHECK(bench->priority_of(bench->new_stream(0, -50)) == kHighestPriority);
  CHECK(bench->priority_of(kDefault) == 0);
}

TEST_CASE("a stream that is not there is refused by name") {
  const Bench bench;
  CHECK_FALSE(bench->has_stream({2, 0}));
  CHECK_FALSE(bench->has_stream({0, 4000}));
  CHECK_FALSE(bench->has_stream({0, -1}));
  CHECK_THROWS_WITH_AS(bench->record({2, 0}), doctest::Contains("there is no sim:2"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(bench->record({0, 4000}), doctest::Contains("stream 4000 of sim:0"), std::invalid_argument);
}

TEST_CASE("statistics count what was done") {
  const Bench bench(Schedule::lazy);
  Bench::work(kDefault, [] {});
  Bench::work(kDefault, [] {});
  Bench::order(Bench::stream(), kDefault);
  Statistics counted = bench->statistics();
  CHECK(counted.submitted == 2);
  CHECK(counted.executed == 0);
  CHECK(counted.recorded == 1);
  CHECK(counted.waited == 1);
  bench->synchronize(0);
  counted = bench->statistics();
  CHECK(counted.executed == 2);
  CHECK(counted.dropped == 0);
}

TEST_SUITE_END();
