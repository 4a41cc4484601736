// Many concurrent host threads: the results are correct, and the sanitizers find no race.
#include <atomic>
#include <cstring>

#include "../together.h"
#include "bench.h"

using namespace sim;
using namespace sim::test;
using native_tests::together;

namespace {

constexpr int kThreads = 8;
constexpr int kRounds = 1000;

}  // namespace

TEST_SUITE_BEGIN("threads");

TEST_CASE("streams of many threads pass memory to one another through events") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule, 1);
    std::atomic<int> errors{0};
    together(kThreads, [&](int t) {
      const StreamName writer{t % 2, 1 + t};
      const StreamName reader{t % 2, 20 + t};
      for (int i = 0; i < kRounds; ++i) {
        void* const block = Bench::memory(256, writer);
        const int value = (t + i) % 250;
        Bench::work(writer, [=] { std::memset(bytes_of(block), value, 256); }, {writes(block, 256)});
        Bench::order(reader, writer);
        Bench::work(reader, [=, &errors] { errors += bytes_of(block)[255] != value ? 1 : 0; }, {reads(block, 256)});
        bench->record_use(block, reader);
        bench->deallocate(block);
        if (i % 16 == 0) bench->synchronize(reader);
        if (i % 16 == 8) bench->query(writer);
      }
      bench->synchronize(reader);
    });
    CHECK(errors == 0);
    CHECK(bench->report_count() == 0);
    CHECK(bench->statistics().executed == 2 * kThreads * kRounds);
  }
}

TEST_CASE("work that many threads submit to shared streams runs exactly once") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule, 2);
    int counts[2] = {0, 0};  // one for each stream
    together(kThreads, [&](int t) {
      for (int i = 0; i < kRounds; ++i) {
        const int s = (t + i) % 2;
        const StreamName stream{0, s};
        Bench::work(stream, [&counts, s] { ++counts[s]; });
        if (i % 3 == 0) Bench::order({0, 1 - s}, stream);
        if (i % 10 == 0) bench->synchronize(0);
      }
    });
    bench->synchronize(0);
    CHECK(counts[0] + counts[1] == kThreads * kRounds);
  }
}

TEST_CASE("threads hold and open gates while other threads wait behind them") {
  for (const WorkSchedule schedule : kSchedules) {
    const Bench bench(schedule, 3);
    together(kThreads, [&](int t) {
      for (int i = 0; i < 20; ++i) {
        const GatePtr gate = bench->hold({0, t});
        Bench::work({0, t}, [] {});
        Bench::order({0, (t + 1) % kThreads}, {0, t});
        bench->open(gate);
        bench->synchronize(StreamName{0, t});
      }
    });
    bench->synchronize(0);
    CHECK(bench->statistics().executed == 20 * kThreads);
  }
}

TEST_CASE("many threads use pinned memory, and none stays in flight") {
  const Bench bench(WorkSchedule::jitter, 4);
  together(kThreads, [&](int t) {
    for (int i = 0; i < kRounds; ++i) {
      void* const block = bench->allocate_pinned(128 + 64 * static_cast<std::size_t>(t));
      Bench::work({0, t}, [=] { std::memset(block, t, 128); }, {writes(block, 128)}, "copy");
      if (i % 4 == 0) bench->synchronize(StreamName{0, t});
      if (i % 4 == 1) bench->take_reports();
      if (bench->any_pinned_in_flight()) bench->host_access({reads(block, 128)}, site("read"));
      bench->deallocate_pinned(block);
    }
  });
  bench->synchronize(0);
  CHECK_FALSE(bench->any_pinned_in_flight());
}

TEST_SUITE_END();
