// The shadow: conflicting accesses, the bytes of a conflict, and forgotten accesses.
#include <doctest/doctest.h>

#include <vector>

#include "bench.h"
#include "machine/shadow.h"

using namespace sim;
using namespace sim::test;

namespace {

constexpr bool kWrite = true;
constexpr bool kRead = false;

// A shadow, and agents with a clock each.
struct Agents {
  std::vector<Conflict> touch(Agent agent, std::uintptr_t begin, std::uintptr_t end, bool writes,
                              const SitePtr& at = nullptr) {
    return shadow.touch({begin, end, writes}, clocks[agent], {clocks[agent].tick(agent), at});
  }
  void order(Agent later, Agent earlier) { clocks[later].join(clocks[earlier]); }

  Shadow shadow;
  VectorClock clocks[5];
};

}  // namespace

TEST_SUITE_BEGIN("shadow");

TEST_CASE("accesses conflict when one of them writes and nothing orders them") {
  for (const bool first : {kRead, kWrite}) {
    for (const bool second : {kRead, kWrite}) {
      for (const bool ordered : {false, true}) {
        Agents agents;
        CHECK(agents.touch(1, 0, 8, first).empty());
        if (ordered) agents.order(2, 1);
        const auto conflicts = agents.touch(2, 0, 8, second);
        CHECK(conflicts.size() == ((first || second) && !ordered ? 1 : 0));
      }
    }
  }
}

TEST_CASE("an agent does not conflict with itself") {
  Agents agents;
  for (const bool writes : {kWrite, kRead, kWrite, kWrite}) CHECK(agents.touch(1, 0, 8, writes).empty());
}

TEST_CASE("two accesses conflict only on the bytes that both touch") {
  Agents agents;
  agents.touch(1, 100, 200, kWrite);
  CHECK(agents.touch(2, 0, 100, kWrite).empty());
  CHECK(agents.touch(2, 200, 300, kWrite).empty());
  const auto conflicts = agents.touch(2, 150, 250, kRead);
  REQUIRE(conflicts.size() == 1);
  CHECK(conflicts[0].begin == 150);
  CHECK(conflicts[0].end == 200);
  CHECK(conflicts[0].earlier.writes);
  CHECK_FALSE(conflicts[0].later.writes);
}

TEST_CASE("an earlier access that is split into several ranges conflicts once") {
  Agents agents;
  agents.touch(1, 0, 100, kWrite);
  agents.touch(1, 20, 30, kRead);
  agents.touch(1, 50, 60, kRead);
  const auto conflicts = agents.touch(2, 0, 100, kRead);
  REQUIRE(conflicts.size() == 1);
  CHECK(conflicts[0].begin == 0);
  CHECK(conflicts[0].end == 100);
}

TEST_CASE("a write conflicts with every unordered reader") {
  Agents agents;
  agents.touch(1, 0, 8, kRead);
  agents.touch(2, 0, 8, kRead);
  agents.touch(3, 0, 8, kRead);
  agents.order(4, 2);
  const auto conflicts = agents.touch(4, 0, 8, kWrite);
  REQUIRE(conflicts.size() == 2);
  CHECK(conflicts[0].earlier.epoch.agent == 1);
  CHECK(conflicts[1].earlier.epoch.agent == 3);
}

TEST_CASE("the shadow keeps only the last read of an agent") {
  Agents agents;
  agents.touch(1, 0, 8, kRead);
  agents.touch(1, 0, 8, kRead);
  CHECK(agents.touch(2, 0, 8, kWrite).size() == 1);
}

TEST_CASE("a write replaces earlier accesses and merges their ranges") {
  Agents agents;
  for (std::uintptr_t i = 0; i < 10; ++i) agents.touch(1, 10 * i, 10 * i + 10, i % 2 == 0);
  CHECK(agents.shadow.ranges() == 10);
  agents.touch(1, 5, 95, kWrite);
  CHECK(agents.shadow.ranges() == 3);
  agents.touch(1, 0, 100, kWrite);
  CHECK(agents.shadow.ranges() == 1);
}

TEST_CASE("a read also covers bytes that were never written") {
  Agents agents;
  agents.touch(1, 10, 20, kWrite);
  agents.touch(1, 30, 40, kWrite);
  agents.order(2, 1);
  CHECK(agents.touch(2, 0, 50, kRead).empty());
  for (const std::uintptr_t at : {0, 10, 25, 35, 49}) CHECK(agents.touch(3, at, at + 1, kWrite).size() >= 1);
}

TEST_CASE("an empty range does not count as an access") {
  Agents agents;
  agents.touch(1, 0, 8, kWrite);
  CHECK(agents.touch(2, 4, 4, kWrite).empty());
  agents.shadow.forget(4, 4);
  CHECK(agents.shadow.ranges() == 1);
}

TEST_CASE("forget_seen() keeps accesses that the clock has not seen") {
  Agents agents;
  agents.touch(1, 0, 100, kRead);
  agents.touch(2, 0, 100, kRead);
  VectorClock seen;
  seen.tick(1);
  agents.shadow.forget_seen(0, 50, seen);
  CHECK(agents.touch(3, 0, 50, kWrite).size() == 1);
  CHECK(agents.touch(3, 50, 100, kWrite).size() == 2);
}

TEST_CASE("a range without accesses is removed") {
  Agents agents;
  agents.touch(1, 0, 100, kWrite);
  agents.shadow.forget_seen(0, 100, agents.clocks[1]);
  CHECK(agents.shadow.ranges() == 0);
  agents.touch(1, 0, 100, kWrite);
  agents.shadow.forget(25, 75);
  CHECK(agents.shadow.ranges() == 2);
  CHECK(agents.touch(2, 25, 75, kWrite).empty());
}

TEST_CASE("take_dropped() returns the sites of replaced accesses") {
  Agents agents;
  const SitePtr at = site("write");
  agents.touch(1, 0, 8, kWrite, at);
  CHECK(at.use_count() == 2);
  agents.touch(1, 0, 8, kWrite);
  CHECK(at.use_count() == 2);
  CHECK(agents.shadow.take_dropped().size() == 1);
  CHECK(at.use_count() == 1);
}

TEST_SUITE_END();
