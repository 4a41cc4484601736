// Which counters have been seen: each once, in whatever order they come.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "../together.h"
#include "counters.h"

using rpc_ext::SeenCounters;

namespace {

constexpr std::uint64_t most_gaps = 1 << 16;

std::vector<std::uint64_t> shuffled(std::uint64_t count, unsigned seed) {
  std::vector<std::uint64_t> counters(count);
  std::iota(counters.begin(), counters.end(), 1);
  std::shuffle(counters.begin(), counters.end(), std::mt19937(seed));
  return counters;
}

}  // namespace

TEST_SUITE_BEGIN("counters");

TEST_CASE("a counter is seen once") {
  SeenCounters seen;
  for (const std::uint64_t counter : {1, 2, 5, 4, 3, 7}) {
    CHECK(seen.insert(counter));
    CHECK_FALSE(seen.insert(counter));
  }
  for (std::uint64_t counter = 1; counter <= 5; counter++) CHECK_FALSE(seen.insert(counter));
  CHECK(seen.insert(6));
  CHECK(seen.insert(8));
}

TEST_CASE("neither the smallest number is a counter nor the largest") {
  SeenCounters seen;
  CHECK_FALSE(seen.insert(0));
  CHECK_FALSE(seen.insert(UINT64_MAX));
  CHECK(seen.insert(UINT64_MAX - 1));
  CHECK_FALSE(seen.insert(UINT64_MAX - 1));
  CHECK(seen.insert(1));
}

TEST_CASE("the order in which they come does not matter") {
  for (unsigned seed = 0; seed < 20; seed++) {
    SeenCounters seen;
    bool all_new = true;
    bool any_again = false;
    for (const std::uint64_t counter : shuffled(2000, seed)) {
      all_new = all_new && seen.insert(counter);
      any_again = any_again || seen.insert(counter);
    }
    CHECK(all_new);
    for (const std::uint64_t counter : shuffled(2000, seed + 1)) any_again = any_again || seen.insert(counter);
    CHECK_FALSE(any_again);
    CHECK(seen.insert(2001));
  }
}

TEST_CASE("of very many gaps the oldest is closed") {
  SeenCounters seen;
  for (std::uint64_t i = 1; i < most_gaps; i++) REQUIRE(seen.insert(2 * i));
  CHECK(seen.insert(2 * most_gaps));  // one too many: the gap at 1 goes
  CHECK_FALSE(seen.insert(1));
  CHECK(seen.insert(3));
  CHECK(seen.insert(2 * most_gaps + 1));
  CHECK_FALSE(seen.insert(2 * most_gaps));
}

TEST_CASE("of threads that bring the same counters, one is the first with each") {
  constexpr int threads = 8;
  constexpr std::uint64_t count = 5000;
  SeenCounters seen;
  std::atomic<std::uint64_t> first{0};
  native_tests::together(threads, [&](int i) {
    for (const std::uint64_t counter : shuffled(count, static_cast<unsigned>(i))) first += seen.insert(counter);
  });
  CHECK(first == count);
  CHECK_FALSE(seen.insert(count));
  CHECK(seen.insert(count + 1));
}

TEST_SUITE_END();
