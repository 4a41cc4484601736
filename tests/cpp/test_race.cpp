// Many threads that use the same futures: each effect happens exactly once, in any order of the threads.
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

TEST_CASE_FIXTURE(DeviceRules, "devices can be read while another thread completes the future") {
  const auto futures = many_pending(300);
  const EventSet events = EventSet::record({device(0), device(1)});
  together(kThreads, [&](int thread) {
    for (const FuturePtr& future : futures) {
      if (thread == 0) {
        future->complete({}, EventSet(events));
        continue;
      }
      const std::size_t count = future->devices().size();
      if (count != 0 && count != 2) Runtime::broken("a thread read devices of a future that were partly written");
      if (future->done() && future->events().devices().size() != 2) Runtime::broken("a done future had no events");
    }
  });
}

TEST_CASE_FIXTURE(Rules, "waits for the first future return every future to every thread") {
  const auto futures = many_pending(200);
  together(kThreads, [&](int thread) {
    if (thread == 0) {
      for (const FuturePtr& future : futures) future->complete({});
      return;
    }
    std::vector<Future*> waited_for;
    for (const FuturePtr& future : futures) waited_for.push_back(future.get());
    Arrivals arrivals(waited_for);
    std::size_t missing = thread % 2 == 0 ? futures.size() : futures.size() / 2;  // half of the threads stop early
    std::vector<bool> seen(futures.size());
    while (missing > 0) {
      std::size_t position = 0;
      if (!arrivals.take(position)) {
        arrivals.next()->wait_until(nullptr);
        continue;
      }
      if (seen[position] || !futures[position]->done()) Runtime::broken("a future arrived twice, or too early");
      seen[position] = true;
      --missing;
    }
  });
}

TEST_CASE_FIXTURE(Rules, "one of several concurrent completions succeeds and sets the state") {
  const auto futures = many_pending(1000);
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
        default:  // several threads may call cancel(), so the state decides
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
        FAIL_CHECK("the future is still pending");
    }
  }
}

TEST_CASE_FIXTURE(Rules, "exactly one of cancel() and start() succeeds") {
  const auto futures = many_pending(2000);
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

TEST_CASE_FIXTURE(Rules, "finished() is called once by concurrent completions") {
  struct Counted final : Producer {
    explicit Counted(std::atomic<int>& finished_count) : finished_count(finished_count) {}
    void finished(Future&) noexcept override { ++finished_count; }
    std::atomic<int>& finished_count;
  };
  std::atomic<int> finished_count{0};
  const auto futures = many_pending(500);
  for (const FuturePtr& future : futures) future->set_producer(std::make_shared<Counted>(finished_count));
  together(kThreads, [&](int thread) {
    for (const FuturePtr& future : futures) {
      if (thread % 2 == 0) {
        future->cancel();
      } else {
        future->complete({});
      }
    }
  });
  CHECK(finished_count == 500);
}

TEST_CASE_FIXTURE(Rules, "while threads attach callbacks and complete futures, every callback runs exactly once") {
  constexpr int kFutures = 400;
  constexpr int kEach = 5;  // callbacks of each thread on each future
  const auto futures = many_pending(kFutures);
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

TEST_CASE_FIXTURE(Rules, "callbacks of one thread keep order for any completing thread") {
  for (int round = 0; round < 300; ++round) {
    const FuturePtr future = pending();
    std::vector<int> order;  // only the completing thread appends: all callbacks are attached before
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

TEST_CASE_FIXTURE(Rules, "a continuation is either detached or run, and not both") {
  const auto futures = many_pending(2000);
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

TEST_CASE_FIXTURE(Rules, "100,000 futures of eight engine threads run their foreign callbacks") {
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

TEST_CASE_FIXTURE(Rules, "any thread may drop the last reference to a future") {
  std::atomic<int> abandoned{0};
  std::atomic<int> destroyed{0};
  const auto count = [&] { ++destroyed; };
  for (int round = 0; round < 100; ++round) {
    FuturePtr waiting = pending();
    waiting->attach(new Callback({}, Continuation::foreign, nullptr, [&] { ++abandoned; }));
    FuturePtr holding = pending();
    holding->complete(Value::of_object(object(count)));
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
  CHECK(destroyed == 100);
}

TEST_CASE_FIXTURE(Rules, "properties can be read while a late error is set") {
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

TEST_CASE_FIXTURE(Rules, "properties can be read while named tensors are set") {
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
