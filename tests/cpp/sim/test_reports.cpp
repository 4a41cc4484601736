// Reports of the race detector: the races that it finds under every schedule, and its messages.
#include <functional>
#include <set>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

using Program = std::function<void(StreamName a, StreamName b, void* memory)>;

std::vector<Report> reports_of(WorkSchedule schedule, std::uint64_t seed, const Program& program) {
  const Bench bench(schedule, seed);
  void* const memory = Bench::memory(4096);
  const StreamName a = Bench::stream(0);
  const StreamName b = Bench::stream(1);
  Bench::order(a, kDefault);
  Bench::order(b, kDefault);
  program(a, b, memory);
  bench->synchronize(0);
  return bench->take_reports();
}

void check_races(std::size_t expected, const Program& program) {
  std::set<std::string> summaries;
  for (const WorkSchedule schedule : kSchedules) {
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      const auto reports = reports_of(schedule, seed, program);
      CHECK(reports.size() == expected);
      for (const Report& report : reports) summaries.insert(report.summary);
    }
  }
  CHECK(summaries.size() == expected);  // the reports do not depend on the schedule
}

}  // namespace

TEST_SUITE_BEGIN("reports");

TEST_CASE("a missing wait is a race, and its report names both accesses") {
  const auto reports = reports_of(WorkSchedule::free, 0, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(a, {writes(memory, 1024)}, "mul");
    Bench::touch(b, {reads(memory, 4096)}, "add");
  });
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].kind == Report::Kind::race);
  CHECK(reports[0].summary ==
        "add on stream 1 of sim:1 reads 1024 bytes that mul on stream 1 of sim:0 writes, and nothing orders the two: "
        "stream 1 of sim:1 must wait for an event recorded on stream 1 of sim:0 after mul");
  CHECK(reports[0].earlier->stack() == "the stack of mul");
  CHECK(reports[0].later->stack() == "the stack of add");
}

TEST_CASE("a wait, a synchronization and a positive query order accesses") {
  check_races(1, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(a, {writes(memory, 8)});
    Bench::touch(b, {writes(memory, 8)});
  });
  check_races(0, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(a, {writes(memory, 8)});
    Bench::order(b, a);
    Bench::touch(b, {writes(memory, 8)});
  });
  check_races(0, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(a, {writes(memory, 8)});
    Bench::sim().synchronize(a);
    Bench::touch(b, {writes(memory, 8)});
  });
  check_races(0, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(a, {writes(memory, 8)});
    while (!Bench::sim().query(a)) {
    }
    Bench::touch(b, {writes(memory, 8)});
  });
}

TEST_CASE("order is transitive through other streams and through the host") {
  check_races(0, [](StreamName a, StreamName b, void* memory) {
    const StreamName between = Bench::stream();
    Bench::touch(a, {writes(memory, 8)});
    Bench::order(between, a);
    Bench::order(b, between);  // `between` ran no work itself
    Bench::touch(b, {writes(memory, 8)});
  });
  check_races(0, [](StreamName a, StreamName b, void* memory) {
    const StreamName between = Bench::stream();
    Bench::touch(a, {writes(memory, 8)});
    Bench::order(between, a);
    Bench::sim().synchronize(between);
    Bench::touch(b, {writes(memory, 8)});
  });
}

TEST_CASE("an event orders only work before its recording") {
  check_races(1, [](StreamName a, StreamName b, void* memory) {
    const RecordingPtr early = Bench::sim().record(a);
    Bench::touch(a, {writes(memory, 8)});
    Bench::sim().wait(b, early);
    Bench::touch(b, {writes(memory, 8)});
  });
  check_races(1, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(a, {writes(memory, 8)});
    const RecordingPtr done = Bench::sim().record(a);
    Bench::touch(b, {writes(memory, 8)});  // before the wait
    Bench::sim().wait(b, done);
  });
}

TEST_CASE("a stream passes on waits that it made after its last work") {
  check_races(0, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(b, {});
    Bench::order(a, b);  // a has seen b's work
    Bench::touch(a, {writes(memory, 8)});
    const StreamName third = Bench::stream();
    Bench::touch(third, {});
    Bench::order(b, third);
    Bench::order(b, a);
    Bench::touch(b, {writes(memory, 8)});
  });
}

TEST_CASE("each pair of sites is reported once") {
  check_races(1, [](StreamName a, StreamName b, void* memory) {
    auto* const at = static_cast<char*>(memory);
    Bench::touch(a, {reads(at, 8), writes(at, 8), writes(at + 100, 8)});
    Bench::touch(b, {reads(at, 8), writes(at, 8), reads(at + 100, 8)});
  });
  check_races(2, [](StreamName a, StreamName b, void* memory) {
    Bench::touch(a, {writes(memory, 8)}, "first");
    Bench::touch(b, {reads(memory, 8)}, "second");
    Bench::touch(b, {reads(memory, 8)}, "third");
  });
}

TEST_CASE("a report of kind `reuse` names an unrecorded stream") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule);
    const StreamName user = Bench::stream();
    void* const block = Bench::memory(4096);
    Bench::order(user, kDefault);
    Bench::touch(user, {reads(block, 1000)}, "add");
    bench->deallocate(block);
    REQUIRE(Bench::memory(4096) == block);
    const auto reports = bench->take_reports();
    REQUIRE(reports.size() == 1);
    CHECK(reports[0].kind == Report::Kind::reuse);
    CHECK(
        reports[0].summary ==
        "allocation on the default stream of sim:0 hands out 1000 bytes again that add on stream 1 of sim:0 may still "
        "use: the memory was freed without record_stream() for stream 1 of sim:0, or without a wait for it");
  }
}

TEST_CASE("memory may be reused after its own stream has waited") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName user = Bench::stream();
  void* const block = Bench::memory(4096);
  Bench::order(user, kDefault);
  Bench::touch(user, {writes(block, 4096)});
  Bench::order(kDefault, user);
  bench->deallocate(block);
  REQUIRE(Bench::memory(4096) == block);
  CHECK(bench->report_count() == 0);
}

TEST_CASE("the use of memory without a wait for its allocation races") {
  const Bench bench(WorkSchedule::lazy);
  void* const block = Bench::memory(4096);
  Bench::touch(Bench::stream(), {writes(block, 4096)}, "fill");
  const auto reports = bench->take_reports();
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].kind == Report::Kind::race);
  CHECK(reports[0].summary.find("4096 bytes that allocation on the default stream of sim:0 allocates") !=
        std::string::npos);
}

TEST_CASE("a report on pinned memory in flight describes the host's access") {
  const Bench bench(WorkSchedule::lazy);
  void* const block = bench->allocate_pinned(64);
  Bench::touch(kDefault, {writes(block, 64)}, "copy");
  bench->host_access({reads(block, 64)}, site("item"));
  const auto reports = bench->take_reports();
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].summary ==
        "item on the host reads 64 bytes of pinned memory that copy on the default stream of sim:0 writes, which may "
        "not have finished: the host must first synchronize with the default stream of sim:0");
  bench->deallocate_pinned(block);
}

TEST_CASE("without detection there are no reports") {
  Settings settings = Bench::with(WorkSchedule::lazy);
  settings.detect = false;
  const Bench bench(settings);
  void* const block = Bench::memory(64);
  Bench::touch(Bench::stream(), {writes(block, 64)});
  Bench::touch(Bench::stream(), {writes(block, 64)});
  CHECK(bench->report_count() == 0);
}

TEST_CASE("reports can be added from outside, are counted, and are taken once") {
  const Bench bench;
  bench->report({Report::Kind::wrong_device, "a tensor of sim:1 in an operation of sim:0", nullptr, site("add")});
  CHECK(bench->report_count() == 1);
  const auto reports = bench->take_reports();
  REQUIRE(reports.size() == 1);
  CHECK(reports[0].kind == Report::Kind::wrong_device);
  CHECK(reports[0].later->operation() == "add");
  CHECK(bench->report_count() == 0);
  CHECK(bench->take_reports().empty());
}

TEST_CASE("the number of kept reports is limited") {
  const Bench bench;
  void* const block = Bench::memory(64);
  const StreamName streams[] = {Bench::stream(), Bench::stream()};
  for (int i = 0; i < 5000; ++i) Bench::touch(streams[i % 2], {writes(block, 64)});
  CHECK(bench->report_count() == 1000);
}

TEST_SUITE_END();
