// The clocks of host threads: a wait joins the waiting thread's clock, and start() sets all clocks to zero.
#include <thread>

#include "../together.h"
#include "bench.h"
#include "sim/runtime/host_clock.h"

using namespace sim;
using namespace sim::test;
using native_tests::together;

namespace {

template <class Body>
void in_thread(Body&& body) {
  std::thread(body).join();
}

// A thread-local object that reads the clock in its destructor.
struct LateReader {
  double* now = nullptr;
  ~LateReader() {
    if (now != nullptr) *now = HostClock::current().now();
  }
};

}  // namespace

TEST_SUITE_BEGIN("host clock");

TEST_CASE("each thread has its own clock") {
  const Bench bench;
  bench->spend(2);
  together(8, [&](int i) {
    for (int round = 0; round < 100; ++round) bench->spend(i);
    CHECK(bench->now() == 100.0 * i);
  });
  CHECK(bench->now() == 2);
}

TEST_CASE("waiting for a device advances the clock of the waiting thread only") {
  const Bench bench;
  Bench::spend(kDefault, {WorkKind::delay, 0, 3});
  const RecordingPtr recording = bench->record(kDefault);
  in_thread([&] {
    bench->synchronize(recording);
    CHECK(bench->now() == 3);
    CHECK(bench->query(recording));
  });
  CHECK(bench->now() == 0);
}

TEST_CASE("work begins after its enqueuing and after the stream's earlier work") {
  const Bench bench;
  const StreamName other = Bench::stream();
  in_thread([&] {
    bench->spend(5);
    Bench::spend(kDefault, {WorkKind::delay, 0, 1});
    bench->synchronize(0);
  });
  Bench::spend(other, {WorkKind::delay, 0, 1});
  CHECK(bench->time_of(bench->record(other)) == 1);
  Bench::spend(kDefault, {WorkKind::delay, 0, 1});
  CHECK(bench->time_of(bench->record(kDefault)) == 7);
}

TEST_CASE("start() sets the clocks of all threads to zero") {
  const Bench bench;
  bench->spend(4);
  in_thread([&] { bench->start(Bench::with(WorkSchedule::free)); });
  CHECK(bench->now() == 0);
  HostClock::current().join(1);
  CHECK(bench->now() == 1);
  HostClock::current().join(0.5);
  CHECK(bench->now() == 1);
}

TEST_CASE("the clock can be read while thread-local objects are destroyed") {
  const Bench bench;
  double now = -1;
  in_thread([&] {
    thread_local LateReader late;  // created before the clock, and destroyed after it
    late.now = &now;
    bench->spend(1);
  });
  CHECK(now == 0);
}

TEST_SUITE_END();
