// A system that cannot start threads: callbacks that need a thread are refused, and later callbacks run.
#include <pthread.h>

#include <atomic>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include "callback.h"
#include "core/callback_thread.h"
#include "core/error.h"
#include "core/thread_cache.h"
#include "rules.h"
#include "serial_queues.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

// Makes the start of threads fail with EAGAIN for a scope, with a stack size that exceeds the address space.
class NoThreads {
 public:
  NoThreads() {
    REQUIRE(pthread_getattr_default_np(&before_) == 0);
    pthread_attr_t attributes;
    REQUIRE(pthread_getattr_default_np(&attributes) == 0);
    REQUIRE(pthread_attr_setstacksize(&attributes, std::size_t{1} << 52) == 0);
    REQUIRE(pthread_setattr_default_np(&attributes) == 0);
    pthread_attr_destroy(&attributes);
  }
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoThreads(const NoThreads&) = delete;
  NoThreads& operator=(const NoThreads&) = delete;

 private:
  pthread_attr_t before_;
};

// A callback of the runtime that completes a child, like the callback of then().
class WithChild final : public Continuation {
 public:
  WithChild(FuturePtr child, Executor* executor) : Continuation(foreign, executor), child_(std::move(child)) {}
  void run(Future&) noexcept override {
    if (!Runtime::inside()) Runtime::broken("a foreign callback ran outside the runtime");
    child_->complete({});
    delete this;
  }
  bool refuse(const std::exception_ptr& error) noexcept override { return child_->fail(Value::of_error(error)); }
  void abandon() noexcept override {
    if (!Runtime::inside()) Runtime::broken("a foreign callback was abandoned outside the runtime");
    delete this;
  }

 private:
  FuturePtr child_;
};

bool is_no_thread_error(Future& failed) {
  failed.mark_seen();
  try {
    std::rethrow_exception(failed.value().error);
  } catch (const Error& error) {
    return error.kind() == ErrorKind::no_thread;
  } catch (...) {
    return false;
  }
}

}  // namespace

TEST_SUITE_BEGIN("thread_limit");

TEST_CASE("alone: a system without threads" * doctest::skip()) {
  SerialQueue& queue = new_serial_queue();
  FuturePtr in_queue = pending();
  FuturePtr on_callback_thread = pending();
  {
    Signal started, limited;
    std::thread engine([&] {
      const EngineThread is_an_engine;
      started.send();
      limited.wait();
      completed()->attach(new WithChild(in_queue, &queue));
      completed()->attach(new WithChild(on_callback_thread, nullptr));
    });
    started.wait();
    const NoThreads none;
    limited.send();
    engine.join();
    CHECK(is_no_thread_error(*in_queue));
    CHECK(is_no_thread_error(*on_callback_thread));
  }
  CHECK_FALSE(CallbackThread::get().has_lost());
  for (Executor* executor : {static_cast<Executor*>(&queue), static_cast<Executor*>(nullptr)}) {
    FuturePtr later = pending();
    on_engine_thread([&] { completed()->attach(new WithChild(later, executor)); });
    later->wait_until(nullptr);
    CHECK(later->state() == State::completed);
  }
  CHECK(Runtime::take_broken().empty());
}

TEST_CASE_FIXTURE(Rules, "without threads a child fails, and later callbacks run") {
  run_alone("alone: a system without threads");
}

TEST_CASE_FIXTURE(Rules, "each callback runs or is refused when threads sometimes fail") {
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  std::vector<FuturePtr> children = many_pending((kThreads - 1) * kRounds);
  std::vector<SerialQueue*> queues;
  for (int i = 0; i < kRounds; ++i) queues.push_back(&new_serial_queue());
  std::atomic<int> working{kThreads - 1};
  together(kThreads, [&](int thread) {
    if (thread == 0) {
      while (working > 0) {
        const NoThreads none;
        std::this_thread::yield();
      }
      return;
    }
    const EngineThread engine;
    for (int i = 0; i < kRounds; ++i) {
      const FuturePtr& child = children[static_cast<std::size_t>((thread - 1) * kRounds + i)];
      completed()->attach(new WithChild(child, queues[static_cast<std::size_t>(i)]));
    }
    --working;
  });
  int refused = 0;
  for (const FuturePtr& child : children) {
    child->wait_until(nullptr);
    if (child->state() == State::completed) continue;
    CHECK(is_no_thread_error(*child));
    ++refused;
  }
  MESSAGE(refused << " refused");
}

TEST_SUITE_END();
