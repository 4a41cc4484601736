// Virtual time. Speeds and sizes are powers of two, so that sums are exact.
#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

Settings clocked(WorkSchedule schedule = WorkSchedule::lazy) {
  Settings settings = Bench::with(schedule);
  settings.speeds = {1024, 256, 0.5};  // bytes per second; seconds
  return settings;
}

Cost compute(double bytes) { return {WorkKind::compute, bytes, 0}; }
Cost copy_in(double bytes) { return {WorkKind::copy_in, bytes, 0}; }
Cost copy_out(double bytes) { return {WorkKind::copy_out, bytes, 0}; }

}  // namespace

TEST_SUITE_BEGIN("virtual time");

TEST_CASE("work takes its launch, bytes and seconds; a delay its seconds") {
  const Bench bench(clocked());
  Bench::spend(kDefault, compute(2048));
  CHECK(bench->time_of(bench->record(kDefault)) == 2.5);
  Bench::spend(kDefault, {WorkKind::compute, 1024, 4});
  CHECK(bench->time_of(bench->record(kDefault)) == 8);
  Bench::spend(kDefault, {WorkKind::delay, 1024, 2});
  CHECK(bench->time_of(bench->record(kDefault)) == 10);
}

TEST_CASE("streams compute concurrently, and the host waits for one only") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(clocked(schedule));
    const StreamName other = Bench::stream();
    Bench::spend(kDefault, compute(1024));
    Bench::spend(other, compute(3072));
    CHECK(bench->now() == 0);
    bench->synchronize(kDefault);
    CHECK(bench->now() == 1.5);
    bench->synchronize(0);
    CHECK(bench->now() == 3.5);
  }
}

TEST_CASE("work that waits for copy and compute begins after both") {
  const Bench bench(clocked());
  const StreamName copies = Bench::stream();
  Bench::spend(copies, copy_in(1024));    // ends at 4.5
  Bench::spend(kDefault, compute(2048));  // ends at 2.5
  Bench::order(kDefault, copies);
  Bench::spend(kDefault, compute(1024));
  bench->synchronize(kDefault);
  CHECK(bench->now() == 6);
}

TEST_CASE("copies queue in each direction, and directions are independent") {
  const Bench bench(clocked());
  const StreamName a = Bench::stream();
  const StreamName b = Bench::stream();
  const StreamName c = Bench::stream();
  Bench::spend(a, copy_in(256));
  Bench::spend(b, copy_in(256));
  Bench::spend(c, copy_out(256));
  CHECK(bench->time_of(bench->record(a)) == 1.5);
  CHECK(bench->time_of(bench->record(b)) == 3);
  CHECK(bench->time_of(bench->record(c)) == 1.5);
  const StreamName elsewhere = Bench::stream(1);
  Bench::spend(elsewhere, copy_in(256));
  CHECK(bench->time_of(bench->record(elsewhere)) == 1.5);
}

TEST_CASE("work does not begin before the host submits it") {
  const Bench bench(clocked());
  bench->spend(8);
  CHECK(bench->time_of(bench->record(kDefault)) == 8);
  Bench::spend(kDefault, compute(1024));
  bench->synchronize(kDefault);
  CHECK(bench->now() == 9.5);
  bench->spend(-3);
  CHECK(bench->now() == 9.5);
}

TEST_CASE("only a positive query advances the host's clock") {
  const Bench bench(clocked());
  Bench::spend(kDefault, compute(1024));
  CHECK_FALSE(bench->query(kDefault));
  CHECK(bench->now() == 0);
  CHECK(bench->query(kDefault));
  CHECK(bench->now() == 1.5);
}

TEST_CASE("a stream keeps its speeds until all speeds are set") {
  const Bench bench(clocked());
  const StreamName slow = Bench::stream();
  bench->set_speeds(slow, {512, 256, 0});
  Bench::spend(slow, compute(1024));
  CHECK(bench->time_of(bench->record(slow)) == 2);
  Bench::spend(kDefault, compute(1024));
  CHECK(bench->time_of(bench->record(kDefault)) == 1.5);
  bench->set_speeds(std::nullopt, {1024, 256, 0});
  Bench::spend(slow, compute(1024));
  CHECK(bench->time_of(bench->record(slow)) == 3);
}

TEST_CASE("virtual time does not depend on the schedule") {
  const auto end_under = [](WorkSchedule schedule, std::uint64_t seed) {
    Settings settings = clocked(schedule);
    settings.seed = seed;
    const Bench bench(settings);
    const StreamName streams[] = {Bench::stream(), Bench::stream(), Bench::stream()};
    for (int i = 0; i < 12; ++i) {
      Bench::spend(streams[i % 3], i % 2 == 0 ? copy_in(64.0 * i) : compute(512.0 * i));
      if (i % 4 == 3) Bench::order(streams[(i + 1) % 3], streams[i % 3]);
    }
    bench->synchronize(0);
    return bench->now();
  };
  const double end = end_under(WorkSchedule::free, 0);
  CHECK(end > 0);
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    for (const WorkSchedule schedule : kSchedules) CHECK(end_under(schedule, seed) == end);
  }
}

TEST_SUITE_END();
