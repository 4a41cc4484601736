#include <doctest/doctest.h>

#include "machine/vector_clock.h"

using namespace sim;

TEST_SUITE_BEGIN("vector clock");

TEST_CASE("a clock has seen its own agent's ticks only") {
  VectorClock clock;
  const ClockEpoch first = clock.tick(3);
  CHECK(first == ClockEpoch{3, 1});
  CHECK(clock.tick(3) == ClockEpoch{3, 2});
  CHECK(clock.has_seen(first));
  CHECK_FALSE(clock.has_seen({3, 3}));
  CHECK_FALSE(clock.has_seen({2, 1}));
  CHECK_FALSE(clock.has_seen({900, 1}));
}

TEST_CASE("join() takes the later time of each agent") {
  VectorClock a;
  VectorClock b;
  a.tick(1);
  a.tick(1);
  b.tick(1);
  const ClockEpoch far = b.tick(7);
  a.join(b);
  CHECK(a.of(1) == 2);
  CHECK(a.has_seen(far));
  CHECK_FALSE(b.has_seen({1, 2}));
}

TEST_SUITE_END();
