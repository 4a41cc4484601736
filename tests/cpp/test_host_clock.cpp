// The virtual time of host threads: the times that futures store, and which times are valid.
#include "core/host_clock.h"

#include <algorithm>

#include "callback.h"
#include "rules.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

thread_local double seconds_of_thread = 0;

struct ThreadClock {
  ThreadClock() { start(); }
  ~ThreadClock() { set_host_clock(nullptr, nullptr); }
  static void start() {
    seconds_of_thread = 0;
    set_host_clock([]() noexcept { return seconds_of_thread; },
                   [](double seconds) noexcept { seconds_of_thread = std::max(seconds_of_thread, seconds); });
  }
};

}  // namespace

TEST_SUITE_BEGIN("host clock");

TEST_CASE_FIXTURE(Rules, "without a clock the host time is always zero") {
  CHECK(host_time().generation == 0);
  CHECK(completed()->completed_at().generation == 0);
  join_host_time({5, 1});
  CHECK(host_time().seconds == 0);
}

TEST_CASE_FIXTURE(Rules, "a completion time is its thread's, but not before creation") {
  const ThreadClock clock;
  seconds_of_thread = 2;
  const FuturePtr future = pending();
  seconds_of_thread = 3;
  future->complete({});
  CHECK(future->completed_at().seconds == 3);
  const FuturePtr created_later = pending();
  seconds_of_thread = 1;
  created_later->complete({});
  CHECK(created_later->completed_at().seconds == 3);
}

TEST_CASE_FIXTURE(Rules, "a future completes no earlier than the futures it inherits from") {
  const ThreadClock clock;
  const FuturePtr whole = pending();
  seconds_of_thread = 7;
  const FuturePtr part = completed();
  seconds_of_thread = 4;
  whole->inherit_host_time(*part);
  whole->complete({});
  CHECK(whole->completed_at().seconds == 7);
  const FuturePtr done = completed();
  done->inherit_host_time(*whole);
  CHECK(done->completed_at().seconds == 4);
}

TEST_CASE_FIXTURE(Rules, "a time of an earlier clock is ignored") {
  const ThreadClock clock;
  seconds_of_thread = 9;
  const FuturePtr old = completed();
  const FuturePtr pending_before = pending();
  ThreadClock::start();
  join_host_time(old->completed_at());
  CHECK(host_time().seconds == 0);
  seconds_of_thread = 1;
  pending_before->complete({});
  CHECK(pending_before->completed_at().seconds == 1);
  CHECK(later_of(old->completed_at(), host_time()).seconds == 1);
  CHECK(later_of(host_time(), old->completed_at()).seconds == 1);
}

TEST_SUITE_END();
