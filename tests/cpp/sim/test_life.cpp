// Start and stop of the accelerator, and forked children.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "../together.h"
#include "bench.h"
#include "sim/runtime/guard.h"

using namespace sim;
using namespace sim::test;
using native_tests::together;

namespace {

// Run `body` in a forked child, append its stderr to `output`, and return its wait status.
template <class Body>
int in_child(Body&& body, std::string& output) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    _exit(body());
  }
  close(ends[1]);
  char part[4096];
  for (ssize_t got = 0; (got = read(ends[0], part, sizeof part)) > 0;)
    output.append(part, static_cast<std::size_t>(got));
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return status;
}

template <class Call>
bool is_refused(Call&& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return std::strstr(error.what(), "forked child") != nullptr;
  }
  return false;
}

}  // namespace

TEST_SUITE_BEGIN("life");

TEST_CASE("stop() drops queued work, and later waits return at once") {
  for (const WorkSchedule schedule : kSchedules) {
    Accelerator& sim = Accelerator::get();
    sim.start(Bench::with(schedule));
    const auto owner = std::make_shared<int>();
    const GatePtr gate = sim.hold(kDefault);
    bool ran = false;
    Bench::work(kDefault, [&ran, owner] { ran = true; });
    const RecordingPtr old = sim.record(kDefault);
    sim.stop();
    CHECK(owner.use_count() == 1);
    CHECK(sim.statistics().dropped == 1);
    CHECK(sim.device_count() == 0);
    CHECK_THROWS_AS(sim.record(kDefault), std::invalid_argument);
    CHECK(sim.query(old));
    sim.start(Bench::with(schedule));
    sim.synchronize(old);
    sim.wait(kDefault, old);
    sim.open(gate);
    sim.synchronize(0);
    CHECK_FALSE(ran);
    sim.stop();
  }
}

TEST_CASE("start() resets clocks, time, reports, errors and the stream pool") {
  StreamName first;
  {
    const Bench bench(WorkSchedule::free);
    first = Bench::stream();
    void* const block = Bench::memory(64);
    Bench::touch(first, {writes(block, 64)});
    bench->spend(3);
    Bench::work(kDefault, [] { throw std::runtime_error("broken"); });
    bench->set_speeds(first, {1, 1, 1});
    bench->deallocate(block);
  }
  const Bench bench(WorkSchedule::free);
  CHECK(bench->now() == 0);
  CHECK(bench->report_count() == 0);
  CHECK(bench->error_of(0) == nullptr);
  CHECK(bench->statistics().submitted == 0);
  CHECK(Bench::stream() == first);
  Bench::spend(first, {WorkKind::compute, 1, 0});
  CHECK(bench->time_of(bench->record(first)) < 1);
}

TEST_CASE("stop() ends a thread's wait for work behind a closed gate") {
  for (const WorkSchedule schedule : kSchedules) {
    Accelerator& sim = Accelerator::get();
    sim.start(Bench::with(schedule));
    sim.hold(kDefault);
    Bench::work(kDefault, [] {});
    const RecordingPtr recording = sim.record(kDefault);
    std::thread waiter([&] { sim.synchronize(recording); });
    sim.stop();
    waiter.join();
  }
}

TEST_CASE("start() throws if settings exceed devices or memory") {
  Settings settings;
  settings.devices = kMaxDevices + 1;
  CHECK_THROWS_AS(Accelerator::get().start(settings), std::invalid_argument);
  settings.devices = 1;
  settings.memory = std::size_t{1} << 60;
  CHECK_THROWS_AS(Accelerator::get().start(settings), std::invalid_argument);
}

TEST_CASE("work that stops the accelerator fails") {
  const Bench bench(WorkSchedule::free);
  Bench::work(kDefault, [&] { bench->stop(); });
  CHECK_THROWS_AS(bench->synchronize(0), std::logic_error);
}

TEST_CASE("start() waits for work that runs in other threads") {
  std::atomic<int> begun{0}, returned{0}, overlaps{0};  // of the calls of start()
  const Bench bench(WorkSchedule::free);
  together(4, [&](int i) {
    for (int round = 0; round < 50; ++round) {
      if (i == 0) {
        ++begun;
        bench->start(Bench::with(kSchedules[round % 3], static_cast<std::uint64_t>(round)));
        ++returned;
        continue;
      }
      Bench::work({0, i}, [&] {
        const int before = returned;
        const bool no_start_runs = begun == before;
        std::this_thread::yield();
        if (no_start_runs && returned != before) ++overlaps;  // a whole start() ran beside this work
      });
      bench->query(StreamName{0, i});
      bench->synchronize(StreamName{0, i});
    }
  });
  CHECK(overlaps == 0);
}

TEST_CASE("a forked child can free memory but not use the accelerator") {
  const Bench bench(WorkSchedule::lazy);
  void* const block = Bench::memory(64);
  void* const pinned = bench->allocate_pinned(64);
  Bench::work(kDefault, [] {});
  const RecordingPtr recording = bench->record(kDefault);
  std::string output;
  const int status = in_child(
      [&] {
        int accepted = 0;
        accepted += is_refused([&] { Bench::work(kDefault, [] {}); }) ? 0 : 1;
        accepted += is_refused([&] { bench->record(kDefault); }) ? 0 : 1;
        accepted += is_refused([&] { bench->query(recording); }) ? 0 : 1;
        accepted += is_refused([&] { bench->synchronize(0); }) ? 0 : 1;
        accepted += is_refused([&] { Bench::memory(8); }) ? 0 : 1;
        accepted += is_refused([&] { bench->allocate_pinned(8); }) ? 0 : 1;
        accepted += is_refused([&] { bench->start(Settings()); }) ? 0 : 1;
        accepted += is_refused([&] { bench->take_reports(); }) ? 0 : 1;
        bench->deallocate(block);
        bench->deallocate_pinned(pinned);
        const bool known = bench->is_pinned(pinned) && bench->device_of(block) == 0;
        return known ? accepted : 100;
      },
      output);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(output.empty());
  bench->deallocate(block);
  bench->deallocate_pinned(pinned);
}

TEST_CASE("the fault handler reports host access to a device address") {
  const Bench bench;
  void* const block = Bench::memory(64, {1, 0});
  std::string output;
  const int status = in_child(
      [&] {
        install_fault_handler();
        install_fault_handler();  // a second call has no effect
        return static_cast<int>(*static_cast<volatile char*>(block));
      },
      output);
  CHECK((!WIFEXITED(status) || WEXITSTATUS(status) != 0));
  CHECK(output.find("host code touched device memory at 0x") != std::string::npos);
  CHECK(output.find("of sim:1 directly") != std::string::npos);
  bench->deallocate(block);
}

TEST_SUITE_END();
