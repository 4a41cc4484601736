// Recordings of events: waits, queries, and the order that they create.
#include "bench.h"

using namespace sim;
using namespace sim::test;

TEST_SUITE_BEGIN("events");

TEST_CASE("a wait waits for the event's current recording, not for later ones") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName waits = Bench::stream();
  Order order;
  Bench::work(kDefault, [&] { order.push_back(1); });
  RecordingPtr event = bench->record(kDefault);
  bench->wait(waits, event);
  Bench::work(waits, [&] { order.push_back(2); });
  Bench::work(kDefault, [&] { order.push_back(3); });
  event = bench->record(kDefault);  // a second recording
  bench->synchronize(waits);
  CHECK(order == Order{1, 2});
  CHECK_FALSE(bench->query(event));
}

TEST_CASE("an event that was never recorded counts as reached") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    CHECK(bench->query(RecordingPtr()));
    bench->synchronize(RecordingPtr());
    bench->wait(kDefault, nullptr);
    CHECK(bench->time_of(nullptr) == 0);
    CHECK(bench->query(kDefault));
  }
}

TEST_CASE("an event on an idle stream is reached") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    CHECK(bench->query(bench->record(kDefault)));
  }
}

TEST_CASE("a stream that waits for its own event does not block") {
  for (const WorkSchedule schedule : kSchedules) {
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
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    const StreamName other{1, 0};
    Order order;
    Bench::work(kDefault, [&] { order.push_back(1); });
    Bench::order(other, kDefault);
    Bench::work(other, [&] { order.push_back(2); });
    bench->synchronize(1);
    CHECK(order == Order{1, 2});
  }
}

TEST_CASE("synchronizing a device runs no work of other devices") {
  const Bench bench(WorkSchedule::lazy);
  Order order;
  const StreamName pooled = Bench::stream(0);
  Bench::work(kDefault, [&] { order.push_back(0); });
  Bench::work(pooled, [&] { order.push_back(0); });
  Bench::work({1, 0}, [&] { order.push_back(1); });
  bench->synchronize(0);
  CHECK(order == Order{0, 0});
}

TEST_CASE("the pool returns the streams of a priority in rotation") {
  const Bench bench;
  for (const int priority : {0, -1, -2, -3}) {
    const StreamName first = bench->new_stream(1, priority);
    for (int i = 1; i < kStreamsPerPriority; ++i) CHECK(bench->new_stream(1, priority).id == first.id + i);
    CHECK(bench->new_stream(1, priority) == first);
    CHECK(bench->priority_of(first) == priority);
    CHECK(bench->has_stream(first));
  }
  CHECK_THROWS_AS(bench->new_stream(0, 1), std::invalid_argument);  // like CUDA's pool
  CHECK(bench->priority_of(bench->new_stream(0, -50)) == kHighestPriority);
  CHECK(bench->priority_of(kDefault) == 0);
}

TEST_CASE("the error for a missing device or stream names it") {
  const Bench bench;
  CHECK_FALSE(bench->has_stream({2, 0}));
  CHECK_FALSE(bench->has_stream({0, 4000}));
  CHECK_FALSE(bench->has_stream({0, -1}));
  CHECK_THROWS_WITH_AS(bench->record({2, 0}), doctest::Contains("there is no sim:2"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(bench->record({0, 4000}), doctest::Contains("stream 4000 of sim:0"), std::invalid_argument);
}

TEST_CASE("statistics count submitted, executed, recorded and waited items") {
  const Bench bench(WorkSchedule::lazy);
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
