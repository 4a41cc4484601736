// Threads that wait for a future: when they wake, and what a deadline leaves behind.
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

TEST_CASE_FIXTURE(Rules, "a deadline that has passed returns false, and the future stays good") {
  const FuturePtr future = pending();
  const Clock::time_point past{};
  CHECK_FALSE(future->wait_until(&past));
  CHECK_FALSE(future->done());
  CHECK(future->complete({}));
  CHECK(future->wait_until(nullptr));
}

TEST_CASE_FIXTURE(Rules, "a deadline before the clock began has passed, and one beyond all time never comes") {
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

TEST_CASE_FIXTURE(Rules, "a deadline is not early") {
  const FuturePtr future = pending();
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(2);
  CHECK_FALSE(future->wait_until(&deadline));
  CHECK(Clock::now() >= deadline);
}

TEST_CASE_FIXTURE(Rules, "waiters are released before the callbacks run") {
  const FuturePtr future = pending();
  std::latch all_waiting(2);
  std::latch released(2);
  // Were it the other way round, the completing thread would wait in the callback for ever.
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

TEST_CASE_FIXTURE(Rules, "any number of waiters wake, each with what was published") {
  constexpr int kWaiters = 8;
  for (int round = 0; round < 200; ++round) {
    const FuturePtr future = pending();
    std::atomic<int> right{0};
    together(kWaiters + 1, [&](int i) {
      if (i == kWaiters) {
        future->complete(Value::of_native(round));
      } else if (future->wait_until(nullptr) && future->value().native.toInt() == round) {
        ++right;
      }
    });
    CHECK(right == kWaiters);
  }
}

TEST_CASE_FIXTURE(Rules, "who completes inside the runtime is inside again when the waiters have been released") {
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
        const Inside inside;  // what a waiter of the runtime does next
      }
    });
    CHECK(inside_after);
  }
}

TEST_CASE_FIXTURE(Rules, "deadlines race completion: the answer is true of the future, and no waiter is left behind") {
  constexpr int kWaiters = 6;
  for (int round = 0; round < 400; ++round) {
    const FuturePtr future = pending();
    std::atomic<int> wrong{0};
    together(kWaiters + 1, [&](int i) {
      const Clock::time_point begin = Clock::now();
      if (i == kWaiters) {
        // Among the deadlines, a little later each round.
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

TEST_CASE_FIXTURE(Rules, "waiters that give up leave the others linked") {
  const FuturePtr future = pending();
  std::latch gave_up(3);
  std::atomic<int> woke{0};
  together(7, [&](int i) {
    if (i == 6) {
      gave_up.wait();
      future->complete({});
    } else if (i % 2 == 0) {
      const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(1);
      CHECK_FALSE(future->wait_until(&deadline));
      gave_up.count_down();
    } else if (future->wait_until(nullptr)) {
      ++woke;
    }
  });
  CHECK(woke == 3);
}

TEST_SUITE_END();
