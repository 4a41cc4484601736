// Pinned memory: the host may access it at any time, except while a stream uses it.
#include <cstring>

#include "bench.h"

using namespace sim;
using namespace sim::test;

TEST_SUITE_BEGIN("pinned memory");

TEST_CASE("the host can access pinned memory, which is poisoned") {
  const Bench bench;
  auto* const block = static_cast<unsigned char*>(bench->allocate_pinned(1000));
  CHECK(block[999] == 0xFF);
  std::memset(block, 3, 1000);
  CHECK(Accelerator::alias(block) == block);
  CHECK(bench->is_pinned(block + 999));
  CHECK_FALSE(bench->is_pinned(&bench));
  CHECK_FALSE(bench->is_pinned(nullptr));
  CHECK_FALSE(bench->device_of(block).has_value());
  bench->deallocate_pinned(block);
  CHECK(bench->allocate_pinned(1000) == block);
  bench->deallocate_pinned(block);
}

TEST_CASE("a pinned block waits for the streams that use it") {
  const Bench bench(WorkSchedule::lazy);
  void* const block = bench->allocate_pinned(4096);
  Bench::touch(kDefault, {reads(block, 8)});
  bench->deallocate_pinned(block);
  void* const second = bench->allocate_pinned(4096);
  CHECK(second != block);
  bench->synchronize(kDefault);
  void* const third = bench->allocate_pinned(4096);
  CHECK(third == block);
  bench->deallocate_pinned(second);
  bench->deallocate_pinned(third);
}

TEST_CASE("a reused block has no earlier accesses") {
  const Bench bench(WorkSchedule::free);
  void* const block = bench->allocate_pinned(4096);
  Bench::touch(Bench::stream(), {writes(block, 8)});
  bench->deallocate_pinned(block);
  REQUIRE(bench->allocate_pinned(4096) == block);
  CHECK_FALSE(bench->any_pinned_in_flight());
  bench->host_access({writes(block, 8)}, site("fill"));
  Bench::touch(Bench::stream(), {writes(block, 8)});
  CHECK(bench->report_count() == 0);
  bench->deallocate_pinned(block);
}

TEST_CASE("the host races with a copy until it has synchronized with it") {
  for (const WorkSchedule schedule : kSchedules) {
    for (const bool copy_writes : {true, false}) {
      for (const bool host_writes : {true, false}) {
        const Bench bench(schedule);
        auto* const block = static_cast<char*>(bench->allocate_pinned(4096));
        CHECK_FALSE(bench->any_pinned_in_flight());
        Bench::touch(kDefault, {access(block, 64, copy_writes)}, "copy");
        CHECK(bench->any_pinned_in_flight());
        bench->host_access({access(block + 64, 64, host_writes)}, site("beside"));
        CHECK(bench->report_count() == 0);
        bench->host_access({access(block + 32, 64, host_writes)}, site("add"));
        const auto reports = bench->take_reports();
        CHECK(reports.size() == (copy_writes || host_writes ? 1 : 0));
        for (const Report& report : reports) CHECK(report.kind == Report::Kind::host_race);
        bench->synchronize(kDefault);
        CHECK_FALSE(bench->any_pinned_in_flight());
        bench->host_access({access(block, 64, host_writes)}, site("add"));
        CHECK(bench->report_count() == 0);
        bench->deallocate_pinned(block);
      }
    }
  }
}

TEST_CASE("an event orders the host after earlier work only") {
  const Bench bench(WorkSchedule::free);
  void* const block = bench->allocate_pinned(4096);
  Bench::touch(kDefault, {writes(block, 8)});
  const RecordingPtr copied = bench->record(kDefault);
  bench->synchronize(copied);
  bench->host_access({reads(block, 8)}, nullptr);
  CHECK(bench->report_count() == 0);
  Bench::touch(kDefault, {writes(block, 8)});
  bench->synchronize(copied);
  bench->host_access({reads(block, 8)}, nullptr);
  CHECK(bench->take_reports().size() == 1);
  bench->deallocate_pinned(block);
}

TEST_CASE("host accesses before the submission of work are no race") {
  const Bench bench(WorkSchedule::lazy);
  void* const block = bench->allocate_pinned(4096);
  Bench::touch(kDefault, {reads(block, 8)});
  bench->host_access({reads(block, 8)}, nullptr);
  Bench::touch(kDefault, {writes(block, 8)});
  Bench::touch(Bench::stream(), {reads(static_cast<char*>(block) + 100, 8)});
  CHECK(bench->report_count() == 0);
  bench->deallocate_pinned(block);
}

TEST_CASE("a host access races if any of its blocks is in flight") {
  const Bench bench(WorkSchedule::lazy);
  auto* const first = static_cast<char*>(bench->allocate_pinned(512));
  auto* const second = static_cast<char*>(bench->allocate_pinned(512));
  REQUIRE(second == first + 512);
  Bench::touch(kDefault, {writes(second, 8)});
  bench->host_access({reads(first, 1024)}, nullptr);
  CHECK(bench->take_reports().size() == 1);
  bench->deallocate_pinned(first);
  bench->deallocate_pinned(second);
}

TEST_SUITE_END();
