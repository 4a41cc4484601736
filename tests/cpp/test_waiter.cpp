// Threads that wait for a future: when they wake, and the state of the future after a deadline.
#include <atomic>
#include <chrono>

#include "callback.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;
using Clock = Future::Clock;

TEST_SUITE_BEGIN("waiter");

TEST_CASE_FIXTURE(Rules, "waiting for a done future returns at once") {
  const FuturePtr future = completed();
  const Clock::time_point past{};
  CHECK(future->wait_until(nullptr));
  CHECK(future->wait_until(&past));
}

TEST_CASE_FIXTURE(Rules, "a wait past its deadline returns false and keeps the future") {
  const FuturePtr future = pending();
  const Clock::time_point past{};
  CHECK_FALSE(future->wait_until(&past));
  CHECK_FALSE(future->done());
  CHECK(future->complete({}));
  CHECK(future->wait_until(nullptr));
}

TEST_CASE_FIXTURE(Rules, "the earliest time is past, and the latest means no deadline") {
  const FuturePtr future = pending();
  for (const Clock::time_point past : {Clock::time_point::min(), Clock::time_point(-std::chrono::nanoseconds(1))}) {
    CHECK_FALSE(future->wait_until(&past));
  }
  const Clock::time_point never = Clock::time_point::max();
  together(2, [&](int i) {
    if (i == 0) {
      CHECK(future->wait_until(&never));
    } else {
      future->complete({});
    }
  });
}

TEST_CASE_FIXTURE(Rules, "a wait does not return before its deadline") {
  const FuturePtr future = pending();
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(2);
  CHECK_FALSE(future->wait_until(&deadline));
  CHECK(Clock::now() >= deadline);
}

TEST_CASE_FIXTURE(Rules, "waiters are released before the callbacks run") {
  const FuturePtr future = pending();
  std::latch all_waiting(2);
  std::latch released(2);
  // In the opposite order the completing thread would deadlock in the callback.
  future->attach(call([&](Future&) { released.wait(); }));
  together(3, [&](int i) {
    if (i < 2) {
      all_waiting.count_down();
      CHECK(future->wait_until(nullptr));
      released.count_down();
    } else {
      all_waiting.wait();
      future->complete({});
    }
  });
}

TEST_CASE_FIXTURE(Rules, "all waiters wake, and each sees the published value") {
  constexpr int kWaiters = 8;
  for (int round = 0; round < 200; ++round) {
    const FuturePtr future = pending();
    std::atomic<int> correct{0};
    together(kWaiters + 1, [&](int i) {
      if (i == kWaiters) {
        future->complete(Value::of_native(round));
      } else if (future->wait_until(nullptr) && future->value().native.toInt() == round) {
        ++correct;
      }
    });
    CHECK(correct == kWaiters);
  }
}

TEST_CASE_FIXTURE(Rules, "a thread that wakes waiters re-enters the runtime") {
  for (int round = 0; round < 200; ++round) {
    const FuturePtr future = pending();
    std::atomic<bool> inside_after{false};
    together(3, [&](int i) {
      if (i == 0) {
        const Inside inside;
        future->complete({});
        inside_after = Runtime::inside();
      } else {
        CHECK(future->wait_until(nullptr));
        const Inside inside;  // a waiter of the runtime takes the lock next
      }
    });
    CHECK(inside_after);
  }
}

TEST_CASE_FIXTURE(Rules, "racing deadlines return the true state and leave no waiter") {
  constexpr int kWaiters = 6;
  for (int round = 0; round < 400; ++round) {
    const FuturePtr future = pending();
    std::atomic<int> wrong{0};
    together(kWaiters + 1, [&](int i) {
      const Clock::time_point begin = Clock::now();
      if (i == kWaiters) {
        // Complete at a time between the deadlines, a little later in each round.
        while (Clock::now() < begin + std::chrono::microseconds(round / 2)) continue;
        future->complete(Value::of_native(round));
        return;
      }
      const Clock::time_point deadline = begin + std::chrono::microseconds(i * 30);
      const bool done = future->wait_until(&deadline);
      if (!done && Clock::now() < deadline) ++wrong;
      if (done && (!future->done() || future->value().native.toInt() != round)) ++wrong;
    });
    CHECK(wrong == 0);
    CHECK(future->done());
  }
}

TEST_CASE_FIXTURE(Rules, "waiters that time out do not unlink the others") {
  const FuturePtr future = pending();
  std::latch timed_out(3);
  std::atomic<int> woke{0};
  together(7, [&](int i) {
    if (i == 6) {
      timed_out.wait();
      future->complete({});
    } else if (i % 2 == 0) {
      const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(1);
      CHECK_FALSE(future->wait_until(&deadline));
      timed_out.count_down();
    } else if (future->wait_until(nullptr)) {
      ++woke;
    }
  });
  CHECK(woke == 3);
}

TEST_SUITE_END();
