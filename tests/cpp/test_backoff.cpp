// The pauses of whoever polls: short at first, in proportion later, and few in all.
#include "core/watcher.h"

#include "rules.h"

using namespace cudafuture;
using namespace std::chrono_literals;

TEST_SUITE_BEGIN("backoff");

TEST_CASE("pauses grow from the first to the longest, and stay there") {
  Backoff backoff(5us, 100us);
  Backoff::Pause before = backoff.next();
  CHECK(before == 5us);
  for (int i = 0; i < 100; ++i) {
    const Backoff::Pause pause = backoff.next();
    CHECK(pause >= before);
    before = pause;
  }
  CHECK(before == 100us);
  backoff.reset();
  CHECK(backoff.next() == 5us);
}

TEST_CASE("even the shortest pause grows, and the longest is no shorter than the first") {
  Backoff none(0us, 1us);
  CHECK(none.next() == 0us);
  CHECK(none.next() > 0us);
  Backoff fixed(7us, 3us);
  fixed.next();
  CHECK(fixed.next() == 7us);
}

TEST_CASE("what happens is noticed late by a sixteenth of the time it took, or by the longest pause") {
  constexpr auto kFirst = 5us;
  constexpr auto kLongest = 5000us;
  Backoff backoff(kFirst, kLongest);
  Backoff::Pause elapsed = 0ns;
  int looks = 0;
  for (; elapsed < 1s; ++looks) {
    const Backoff::Pause pause = backoff.next();
    CHECK(pause <= kLongest);
    CHECK(pause <= kFirst + elapsed / 16 + 1us);
    elapsed += pause;
  }
  CHECK(looks < 300);  // so a second costs the watcher the time of so many looks
}

TEST_SUITE_END();
