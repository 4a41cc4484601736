// Errors of a device: work that throws puts its device into an error state.
#include <stdexcept>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

void fail(StreamName stream, const char* text = "assertion failed\nwith details") {
  Bench::work(stream, [=] { throw std::runtime_error(text); }, {}, "index_select");
}

}  // namespace

TEST_SUITE_BEGIN("errors");

TEST_CASE("device calls throw after an error until it is cleared") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    const StreamName other = Bench::stream();
    const RecordingPtr recording = bench->record(other);
    fail(kDefault);
    CHECK_THROWS_WITH_AS(bench->synchronize(kDefault), doctest::Contains("assertion failed"), std::runtime_error);
    CHECK_THROWS_AS(bench->synchronize(recording), std::runtime_error);
    CHECK_THROWS_AS(bench->synchronize(0), std::runtime_error);
    CHECK_THROWS_AS(bench->query(other), std::runtime_error);
    CHECK_THROWS_AS(bench->query(recording), std::runtime_error);
    CHECK(bench->error_of(0) != nullptr);
    CHECK(bench->error_of(1) == nullptr);
    bench->synchronize(1);
    bench->clear_error(0);
    bench->synchronize(0);
    bool ran = false;
    Bench::work(kDefault, [&] { ran = true; });
    bench->synchronize(0);
    CHECK(ran);
  }
}

TEST_CASE("an error drops queued and new work until it is cleared") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName other = Bench::stream();
  const StreamName elsewhere{1, 0};
  Order order;
  const auto owner = std::make_shared<int>();
  fail(kDefault);
  Bench::work(kDefault, [&, owner] { order.push_back(1); });
  Bench::work(other, [&, owner] { order.push_back(2); });
  Bench::order(elsewhere, other);
  Bench::work(elsewhere, [&] { order.push_back(3); });
  CHECK_THROWS_AS(bench->synchronize(kDefault), std::runtime_error);
  CHECK(owner.use_count() == 1);
  Bench::work(other, [&, owner] { order.push_back(4); });
  CHECK(owner.use_count() == 1);
  bench->synchronize(1);
  CHECK(order == Order{3});
  CHECK(bench->statistics().dropped == 3);
}

TEST_CASE("an error is reported once, with the first line of its message") {
  const Bench bench(WorkSchedule::free);
  fail(kDefault);
  fail(kDefault);
  const auto reports = bench->take_reports();
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].kind == Report::Kind::error);
  CHECK(reports[0].summary == "index_select failed on the default stream of sim:0: assertion failed");
  CHECK(reports[0].later->operation() == "index_select");
}

TEST_CASE("a device keeps its first error") {
  const Bench bench(WorkSchedule::lazy);
  fail(kDefault, "first");
  CHECK_THROWS_WITH(bench->synchronize(0), "first");
  fail(kDefault, "second");
  CHECK_THROWS_WITH(bench->synchronize(0), "first");
}

TEST_CASE("memory of a device with an error can be allocated and freed") {
  const Bench bench(WorkSchedule::lazy);
  fail(kDefault);
  CHECK_THROWS_AS(bench->synchronize(0), std::runtime_error);
  void* const block = Bench::memory(512);
  bench->record_use(block, Bench::stream());
  bench->deallocate(block);
  CHECK(Bench::memory(std::size_t{64} << 20) != nullptr);
}

TEST_SUITE_END();
