// Device memory: addresses that are only names, reuse in stream order, deferral, poison, and its end.
#include <cstring>
#include <set>

#include "bench.h"

using namespace sim;
using namespace sim::test;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Allocates and frees by a pattern, and returns the addresses.
std::vector<void*> addresses_of_a_program() {
  const Bench bench(Schedule::jitter, 3);
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

TEST_CASE("an address names its device, and work finds the memory behind it") {
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

TEST_CASE("no bytes are a null pointer, and freeing what is not ours does nothing") {
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

TEST_CASE("memory is allocated on a stream of its own device") {
  const Bench bench;
  CHECK_THROWS_AS(bench->allocate(1, 8, kDefault, nullptr), std::invalid_argument);
}

TEST_CASE("a freed block is reused at once on its own stream, and on no other") {
  const Bench bench(Schedule::lazy);
  const StreamName other = Bench::stream();
  void* const first = Bench::memory(4096);
  bench->deallocate(first);
  CHECK(Bench::memory(4096, other) != first);
  CHECK(Bench::memory(4000) == first);
}

TEST_CASE("the last freed is reused first, and never for something far smaller") {
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

TEST_CASE("a block that another stream uses is reused after that stream has got there") {
  const Bench bench(Schedule::lazy);
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

TEST_CASE("that a block is free orders nothing else") {
  const Bench bench(Schedule::free);  // everything is reached at once
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

TEST_CASE("fresh memory is poisoned in stream order, if wanted") {
  for (const bool poison : {true, false}) {
    Options options = Bench::with(Schedule::lazy);
    options.poison = poison;
    const Bench bench(options);
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

TEST_CASE("the same program gets the same addresses") {
  const auto first = addresses_of_a_program();
  CHECK(std::set<void*>(first.begin(), first.end()).size() < first.size());
  CHECK(addresses_of_a_program() == first);
}

TEST_CASE("a full device waits for what is held back, and gives cached blocks to other streams") {
  const Bench bench(Schedule::lazy);  // 64 MiB each
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

TEST_CASE("a device that is full says so") {
  const Bench bench;
  void* const block = Bench::memory(40 * kMiB);
  CHECK_THROWS_WITH_AS(Bench::memory(30 * kMiB), doctest::Contains("64 MiB that it has, 40 MiB are in use"),
                       OutOfMemory);
  void* const there = Bench::memory(30 * kMiB, {1, 0});
  bench->deallocate(block);
  bench->deallocate(there);
  CHECK(Bench::memory(64 * kMiB) != nullptr);
}

TEST_CASE("empty_cache gives free blocks back and forgets who used them") {
  const Bench bench(Schedule::lazy);
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

TEST_CASE("memory outlives start and stop") {
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

TEST_CASE("memory that is freed while work is queued can still be touched by it") {
  const Bench bench(Schedule::lazy);
  void* const block = Bench::memory(4096);
  Bench::work(kDefault, [=] { std::memset(bytes_of(block), 1, 4096); });
  bench->deallocate(block);
  bench->empty_cache();
  CHECK(bench->statistics().executed == 1);
}

TEST_SUITE_END();
