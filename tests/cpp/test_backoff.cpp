// Backoff: pauses between polls that are short at first and then grow in proportion to the elapsed time.
#include "core/watcher.h"

#include "rules.h"

using namespace cudafuture;
using namespace std::chrono_literals;

TEST_SUITE_BEGIN("backoff");

TEST_CASE("pauses grow from the first to the longest, and reset() starts again") {
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

TEST_CASE("a first pause of zero grows up to the longest pause") {
  Backoff none(0us, 1us);
  CHECK(none.next() == 0us);
  CHECK(none.next() > 0us);
  Backoff fixed(7us, 3us);
  fixed.next();
  CHECK(fixed.next() == 7us);
}

TEST_CASE("each pause is at most a sixteenth of the elapsed time") {
  constexpr auto kFirst = 5us;
  constexpr auto kLongest = 5000us;
  Backoff backoff(kFirst, kLongest);
  Backoff::Pause elapsed = 0ns;
  int polls = 0;
  for (; elapsed < 1s; ++polls) {
    const Backoff::Pause pause = backoff.next();
    CHECK(pause <= kLongest);
    CHECK(pause <= kFirst + elapsed / 16 + 1us);
    elapsed += pause;
  }
  CHECK(polls < 300);  // the cost of the watcher in the first second
}

TEST_SUITE_END();
