// Device memory: addresses that the host cannot access, reuse in stream order, deferred frees, poison, and release.
#include <cstring>
#include <set>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Allocate and free in a fixed pattern, and return the addresses.
std::vector<void*> addresses_of_a_program() {
  const Bench bench(WorkSchedule::jitter, 3);
  const StreamName streams[] = {kDefault, Bench::stream(), Bench::stream()};
  std::vector<void*> addresses;
  std::vector<void*> held;
  for (std::size_t i = 0; i < 200; ++i) {
    held.push_back(Bench::memory(100 + 700 * (i % 7), streams[i % 3]));
    addresses.push_back(held.back());
    if (i % 3 != 2) continue;
    bench->record_use(held.front(), streams[i % 2]);
    bench->deallocate(held.front());
    held.erase(held.begin());
  }
  for (void* pointer : held) bench->deallocate(pointer);
  bench->synchronize(0);
  return addresses;
}

}  // namespace

TEST_SUITE_BEGIN("memory");

TEST_CASE("an address identifies its device and reaches its memory") {
  const Bench bench;
  auto* const here = static_cast<char*>(Bench::memory(1000));
  auto* const there = static_cast<char*>(Bench::memory(1000, {1, 0}));
  CHECK(bench->device_of(here) == 0);
  CHECK(bench->device_of(there + 999) == 1);
  CHECK_FALSE(bench->device_of(&bench).has_value());
  CHECK_FALSE(bench->device_of(nullptr).has_value());
  CHECK(Accelerator::alias(here) != here);
  CHECK(static_cast<char*>(Accelerator::alias(here + 10)) == static_cast<char*>(Accelerator::alias(here)) + 10);
  int on_host = 0;
  CHECK(Accelerator::alias(&on_host) == &on_host);
  CHECK(Accelerator::alias(nullptr) == nullptr);
  Bench::work(kDefault, [&] { std::memset(bytes_of(here), 7, 1000); });
  CHECK(bytes_of(here)[999] == 7);
  bench->deallocate(here);
  bench->deallocate(there);
}

TEST_CASE("allocating zero bytes and freeing foreign pointers have no effect") {
  const Bench bench;
  CHECK(Bench::memory(0) == nullptr);
  CHECK(bench->allocate_pinned(0) == nullptr);
  int on_host = 0;
  bench->deallocate(nullptr);
  bench->deallocate(&on_host);
  bench->deallocate_pinned(&on_host);
  bench->record_use(&on_host, kDefault);
  CHECK(bench->statistics().allocated_bytes == 0);
}

TEST_CASE("an allocation on a stream of another device throws") {
  const Bench bench;
  CHECK_THROWS_AS(bench->allocate(1, 8, kDefault, nullptr), std::invalid_argument);
}

TEST_CASE("a freed block is reused at once on its own stream only") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName other = Bench::stream();
  void* const first = Bench::memory(4096);
  bench->deallocate(first);
  CHECK(Bench::memory(4096, other) != first);
  CHECK(Bench::memory(4000) == first);
}

TEST_CASE("the last freed block is reused first, if its size fits") {
  const Bench bench;
  void* const a = Bench::memory(kMiB);
  void* const b = Bench::memory(kMiB);
  bench->deallocate(a);
  bench->deallocate(b);
  void* const small = Bench::memory(512);
  CHECK(small != a);
  CHECK(small != b);
  CHECK(Bench::memory(kMiB) == b);
  CHECK(Bench::memory(kMiB) == a);
}

TEST_CASE("a block waits for the other streams that use it") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName user = Bench::stream();
  void* const block = Bench::memory(4096);
  Bench::order(user, kDefault);
  Bench::touch(user, {reads(block, 4096)});
  bench->record_use(static_cast<char*>(block) + 100, user);
  bench->deallocate(block);
  CHECK(bench->statistics().deferred_blocks == 1);
  CHECK(Bench::memory(4096) != block);
  bench->synchronize(user);
  CHECK(Bench::memory(4096) == block);
  CHECK(bench->statistics().deferred_blocks == 0);
  CHECK(bench->report_count() == 0);
}

TEST_CASE("the reuse of a block orders no accesses to other memory") {
  const Bench bench(WorkSchedule::free);  // work runs when it is submitted
  const StreamName user = Bench::stream();
  void* const block = Bench::memory(4096);
  void* const elsewhere = Bench::memory(4096);
  Bench::order(user, kDefault);
  Bench::touch(user, {reads(block, 4096), writes(elsewhere, 8)});
  bench->record_use(block, user);
  bench->deallocate(block);
  REQUIRE(Bench::memory(4096) == block);
  CHECK(bench->report_count() == 0);
  Bench::touch(kDefault, {writes(block, 4096)});
  CHECK(bench->report_count() == 0);
  Bench::touch(kDefault, {reads(elsewhere, 8)});
  CHECK(bench->take_reports().size() == 1);
}

TEST_CASE("the option `poison` poisons fresh memory in stream order") {
  for (const bool poison : {true, false}) {
    Settings settings = Bench::with(WorkSchedule::lazy);
    settings.poison = poison;
    const Bench bench(settings);
    void* const block = Bench::memory(1000);
    Bench::work(kDefault, [=] { std::memset(bytes_of(block), 1, 1000); });
    bench->deallocate(block);
    REQUIRE(Bench::memory(1000) == block);
    int seen = 0;
    Bench::work(kDefault, [&] { seen = bytes_of(block)[999]; });
    bench->synchronize(0);
    CHECK(seen == (poison ? 0xFF : 1));
    CHECK(bench->statistics().executed == 2);
  }
}

TEST_CASE("two runs of a program get the same addresses") {
  const auto first = addresses_of_a_program();
  CHECK(std::set<void*>(first.begin(), first.end()).size() < first.size());
  CHECK(addresses_of_a_program() == first);
}

TEST_CASE("an allocation on a full device waits for deferred blocks") {
  const Bench bench(WorkSchedule::lazy);  // 64 MiB per device
  const StreamName user = Bench::stream();
  void* const a = Bench::memory(32 * kMiB);
  void* const b = Bench::memory(24 * kMiB);
  Bench::order(user, kDefault);
  bool ran = false;
  Bench::work(user, [&] { ran = true; });
  bench->record_use(a, user);
  bench->deallocate(a);
  bench->deallocate(b);
  void* const big = Bench::memory(60 * kMiB, user);
  CHECK(big != nullptr);
  CHECK(ran);
  CHECK(bench->statistics().reserved_bytes == 60 * kMiB);
  CHECK(bench->report_count() == 0);
}

TEST_CASE("an allocation that exceeds the free memory throws OutOfMemory with the sizes") {
  const Bench bench;
  void* const block = Bench::memory(40 * kMiB);
  CHECK_THROWS_WITH_AS(Bench::memory(30 * kMiB), doctest::Contains("64 MiB that it has, 40 MiB are in use"),
                       OutOfMemory);
  void* const there = Bench::memory(30 * kMiB, {1, 0});
  bench->deallocate(block);
  bench->deallocate(there);
  CHECK(Bench::memory(64 * kMiB) != nullptr);
}

TEST_CASE("empty_cache() releases free blocks and clears their accesses") {
  const Bench bench(WorkSchedule::lazy);
  const StreamName other = Bench::stream();
  void* const block = Bench::memory(kMiB);
  Bench::touch(kDefault, {writes(block, kMiB)});
  bench->deallocate(block);
  CHECK(bench->statistics().reserved_bytes == kMiB);
  bench->empty_cache();
  CHECK(bench->statistics().reserved_bytes == 0);
  CHECK(bench->statistics().executed == 1);
  CHECK(Bench::memory(kMiB, other) == block);
  CHECK(bench->report_count() == 0);
}

TEST_CASE("memory stays allocated across stop() and start()") {
  void* block = nullptr;
  {
    const Bench bench;
    block = bench->allocate(0, 512, kDefault, nullptr);
    std::memset(bytes_of(block), 5, 512);
  }
  const Bench bench;
  CHECK(bytes_of(block)[511] == 5);
  CHECK(Bench::memory(512) != block);
  bench->record_use(block, Bench::stream());
  bench->deallocate(block);
  CHECK(bench->statistics().allocated_bytes == 512);
}

TEST_CASE("queued work can access memory that was freed after its submission") {
  const Bench bench(WorkSchedule::lazy);
  void* const block = Bench::memory(4096);
  Bench::work(kDefault, [=] { std::memset(bytes_of(block), 1, 4096); });
  bench->deallocate(block);
  bench->empty_cache();
  CHECK(bench->statistics().executed == 1);
}

TEST_SUITE_END();
