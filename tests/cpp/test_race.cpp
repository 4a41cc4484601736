// Many threads on the same futures: whatever the order, each thing happens exactly once.
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "callback.h"
#include "core/arrivals.h"
#include "core/callback_thread.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

constexpr int kThreads = 8;

}  // namespace

TEST_SUITE_BEGIN("race");

TEST_CASE_FIXTURE(DeviceRules, "the devices of a pending future can be asked for while it is completed") {
  const auto futures = many(300);
  const EventSet events = EventSet::record({device(0), device(1)});
  together(kThreads, [&](int thread) {
    for (const FuturePtr& future : futures) {
      if (thread == 0) {
        future->complete({}, EventSet(events));
        continue;
      }
      const std::size_t count = future->devices().size();
      if (count != 0 && count != 2) Runtime::broken("the devices of a future were half written");
      if (future->done() && future->events().devices().size() != 2) Runtime::broken("a done future had no events");
    }
  });
}

TEST_CASE_FIXTURE(Rules, "many threads that wait for the first of several futures each get every one of them") {
  const auto futures = many(200);
  together(kThreads, [&](int thread) {
    if (thread == 0) {
      for (const FuturePtr& future : futures) future->complete({});
      return;
    }
    std::vector<Future*> waited_for;
    for (const FuturePtr& future : futures) waited_for.push_back(future.get());
    Arrivals arrivals(waited_for);
    std::size_t wanted = thread % 2 == 0 ? futures.size() : futures.size() / 2;  // some stop early
    std::vector<bool> seen(futures.size());
    while (wanted > 0) {
      std::size_t position = 0;
      if (!arrivals.take(position)) {
        arrivals.next()->wait_until(nullptr);
        continue;
      }
      if (seen[position] || !futures[position]->done()) Runtime::broken("a future arrived twice, or too early");
      seen[position] = true;
      --wanted;
    }
  });
}

TEST_CASE_FIXTURE(Rules, "of many who complete, fail and cancel one future, one succeeds and its outcome stands") {
  const auto futures = many(1000);
  std::vector<std::atomic<int>> winner(futures.size());
  std::vector<std::atomic<int>> winners(futures.size());
  together(kThreads, [&](int thread) {
    for (std::size_t i = 0; i < futures.size(); ++i) {
      Future& future = *futures[i];
      bool won = false;
      switch (thread % 3) {
        case 0:
          won = future.complete(Value::of_native(thread));
          break;
        case 1:
          won = future.fail(Value::of_error(std::make_exception_ptr(thread)));
          break;
        default:  // several may learn that it is cancelled: only the state tells
          future.cancel();
          break;
      }
      if (!won) continue;
      ++winners[i];
      winner[i] = thread;
    }
  });
  for (std::size_t i = 0; i < futures.size(); ++i) {
    Future& future = *futures[i];
    future.mark_seen();
    switch (future.state()) {
      case State::completed:
        CHECK(winners[i] == 1);
        CHECK(future.value().native.toInt() == winner[i]);
        break;
      case State::failed:
        CHECK(winners[i] == 1);
        CHECK(winner[i] % 3 == 1);
        break;
      case State::cancelled:
        CHECK(winners[i] == 0);
        break;
      case State::pending:
        FAIL_CHECK("nobody won");
    }
  }
}

TEST_CASE_FIXTURE(Rules, "cancel and start never both succeed, and one of them does") {
  const auto futures = many(2000);
  std::vector<char> started(futures.size());
  std::vector<char> cancelled(futures.size());
  together(2, [&](int thread) {
    for (std::size_t i = 0; i < futures.size(); ++i) {
      if (thread == 0) {
        started[i] = futures[i]->start();
      } else {
        cancelled[i] = futures[i]->cancel();
      }
    }
  });
  for (std::size_t i = 0; i < futures.size(); ++i) {
    CHECK(started[i] != cancelled[i]);
    CHECK((futures[i]->state() == State::cancelled) == (cancelled[i] != 0));
  }
}

TEST_CASE_FIXTURE(Rules, "a producer is told once however many end its future") {
  struct Counted final : Producer {
    explicit Counted(std::atomic<int>& told) : told(told) {}
    void finished(Future&) noexcept override { ++told; }
    std::atomic<int>& told;
  };
  std::atomic<int> told{0};
  const auto futures = many(500);
  for (const FuturePtr& future : futures) future->set_producer(std::make_shared<Counted>(told));
  together(kThreads, [&](int thread) {
    for (const FuturePtr& future : futures) {
      if (thread % 2 == 0) {
        future->cancel();
      } else {
        future->complete({});
      }
    }
  });
  CHECK(told == 500);
}

TEST_CASE_FIXTURE(Rules, "threads that attach and complete at once: every callback runs exactly once") {
  constexpr int kFutures = 400;
  constexpr int kEach = 5;  // callbacks of each thread on each future
  const auto futures = many(kFutures);
  std::vector<std::atomic<int>> runs(kFutures * kThreads * kEach);
  together(kThreads, [&](int thread) {
    for (int i = 0; i < kFutures; ++i) {
      for (int k = 0; k < kEach; ++k) {
        if (k == thread % kEach) futures[static_cast<std::size_t>(i)]->complete({});
        const std::size_t slot = static_cast<std::size_t>((i * kThreads + thread) * kEach + k);
        futures[static_cast<std::size_t>(i)]->attach(call([&, slot](Future&) { ++runs[slot]; }));
      }
    }
  });
  int wrong = 0;
  for (const auto& n : runs) wrong += n != 1;
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(Rules, "callbacks attached by one thread run in that order, whoever completes") {
  for (int round = 0; round < 300; ++round) {
    const FuturePtr future = pending();
    std::vector<int> order;  // appended to by the completing thread only: all are attached before
    std::latch attached(1);
    together(3, [&](int thread) {
      if (thread == 0) {
        for (int i = 0; i < 20; ++i) future->attach(call([&, i](Future&) { order.push_back(i); }));
        attached.count_down();
      } else {
        attached.wait();
        future->complete({});
      }
    });
    REQUIRE(order.size() == 20);
    CHECK(std::is_sorted(order.begin(), order.end()));
  }
}

TEST_CASE_FIXTURE(Rules, "a continuation is either detached or run, never both, never neither") {
  const auto futures = many(2000);
  std::vector<std::atomic<int>> ran(futures.size());
  std::vector<std::atomic<int>> detached(futures.size());
  std::vector<Callback*> callbacks;
  for (std::size_t i = 0; i < futures.size(); ++i) {
    futures[i]->attach(call({}));
    callbacks.push_back(call([&, i](Future&) { ++ran[i]; }));
    futures[i]->attach(callbacks.back());
    futures[i]->attach(call({}));
  }
  together(3, [&](int thread) {
    for (std::size_t i = 0; i < futures.size(); ++i) {
      if (thread == 0) {
        futures[i]->complete({});
      } else if (futures[i]->detach(callbacks[i])) {
        ++detached[i];
        callbacks[i]->abandon();
      }
    }
  });
  for (std::size_t i = 0; i < futures.size(); ++i) CHECK(ran[i] + detached[i] == 1);
}

TEST_CASE_FIXTURE(Rules, "100,000 futures, made and completed by 8 threads of engines, run callbacks of the runtime") {
  constexpr int kFutures = 100'000 / kThreads;
  std::atomic<int> ran{0};
  const auto before = CallbackThread::get().callbacks_run();
  together(kThreads, [&](int) {
    EngineThread engine;
    for (int i = 0; i < kFutures; ++i) {
      const FuturePtr future = pending();
      future->attach(call_inside([&](Future&) { ran.fetch_add(1, std::memory_order_relaxed); }));
      future->complete(Value::of_native(i));
    }
  });
  settle_callback_thread();
  CHECK(ran == kFutures * kThreads);
  CHECK(CallbackThread::get().callbacks_run() - before >= static_cast<std::uint64_t>(kFutures) * kThreads);
}

TEST_CASE_FIXTURE(Rules, "the last reference may go in any thread, with callbacks and objects still held") {
  std::atomic<int> abandoned{0};
  std::atomic<int> died{0};
  const auto bump = [&] { ++died; };
  for (int round = 0; round < 100; ++round) {
    FuturePtr waiting = pending();
    waiting->attach(new Callback({}, Continuation::foreign, nullptr, [&] { ++abandoned; }));
    FuturePtr holding = pending();
    holding->complete(Value::of_object(object(bump)));
    std::vector<FuturePtr> references(kThreads * 2);
    for (int i = 0; i < kThreads; ++i) {
      references[static_cast<std::size_t>(i)] = waiting;
      references[static_cast<std::size_t>(i + kThreads)] = holding;
    }
    waiting.reset();
    holding.reset();
    together(kThreads, [&](int i) {
      EngineThread engine;
      references[static_cast<std::size_t>(i)].reset();
      references[static_cast<std::size_t>(i + kThreads)].reset();
    });
  }
  settle_callback_thread();
  CHECK(abandoned == 100);
  CHECK(died == 100);
}

TEST_CASE_FIXTURE(Rules, "the facts of a future can be read while a late error arrives") {
  for (int round = 0; round < 200; ++round) {
    const FuturePtr future = completed();
    together(2, [&](int thread) {
      if (thread == 0) {
        future->set_late_error(std::make_exception_ptr(round));
      } else {
        CHECK(future->name().empty());
        CHECK(future->default_executor() == nullptr);
        CHECK(future->devices().empty());
        CHECK(future->named_tensors().empty());
        CHECK_FALSE(future->released());
      }
    });
    CHECK(future->late_error() != nullptr);
  }
}

TEST_CASE_FIXTURE(Rules, "the facts of a future can be read while it is completed with named tensors") {
  for (int round = 0; round < 200; ++round) {
    const FuturePtr future = pending();
    together(2, [&](int thread) {
      if (thread == 0) {
        future->complete({}, {}, {at::Tensor()});
      } else {
        CHECK(future->name().empty());
        CHECK_FALSE(future->is_bounded());
        CHECK(future->default_executor() == nullptr);
      }
    });
    CHECK(future->named_tensors().size() == 1);
  }
}

TEST_SUITE_END();
