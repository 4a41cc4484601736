// Seen counters: each counter is accepted once, in any order of arrival.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "../together.h"
#include "seal/counters.h"

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

TEST_CASE("a counter is inserted once") {
  SeenCounters seen;
  for (const std::uint64_t counter : {1, 2, 5, 4, 3, 7}) {
    CHECK(seen.insert(counter));
    CHECK_FALSE(seen.insert(counter));
  }
  for (std::uint64_t counter = 1; counter <= 5; counter++) CHECK_FALSE(seen.insert(counter));
  CHECK(seen.insert(6));
  CHECK(seen.insert(8));
}

TEST_CASE("zero and the largest integer are not counters") {
  SeenCounters seen;
  CHECK_FALSE(seen.insert(0));
  CHECK_FALSE(seen.insert(UINT64_MAX));
  CHECK(seen.insert(UINT64_MAX - 1));
  CHECK_FALSE(seen.insert(UINT64_MAX - 1));
  CHECK(seen.insert(1));
}

TEST_CASE("counters are inserted once in any order of arrival") {
  for (unsigned seed = 0; seed < 20; seed++) {
    SeenCounters seen;
    bool all_new = true;
    bool any_repeated = false;
    for (const std::uint64_t counter : shuffled(2000, seed)) {
      all_new = all_new && seen.insert(counter);
      any_repeated = any_repeated || seen.insert(counter);
    }
    CHECK(all_new);
    for (const std::uint64_t counter : shuffled(2000, seed + 1)) any_repeated = any_repeated || seen.insert(counter);
    CHECK_FALSE(any_repeated);
    CHECK(seen.insert(2001));
  }
}

TEST_CASE("the oldest gap is closed if there are too many") {
  SeenCounters seen;
  for (std::uint64_t i = 1; i < most_gaps; i++) REQUIRE(seen.insert(2 * i));
  CHECK(seen.insert(2 * most_gaps));  // one gap too many: the gap at 1 is closed
  CHECK_FALSE(seen.insert(1));
  CHECK(seen.insert(3));
  CHECK(seen.insert(2 * most_gaps + 1));
  CHECK_FALSE(seen.insert(2 * most_gaps));
}

TEST_CASE("if many threads insert the same counters, each counter is inserted once") {
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
