// Async error sources of a future: failures that its engine reports after completion.
#include <atomic>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "callback.h"
#include "fake_device.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

std::exception_ptr failure(const char* what) { return std::make_exception_ptr(std::runtime_error(what)); }

// An engine with a configured answer that counts its calls. The test and the future share it.
struct Engine {
  std::exception_ptr answer;
  bool decided = true;
  bool succeeded = false;
  std::atomic<int> queries{0};
  std::atomic<int> confirmations{0};
  std::atomic<int> dropped{0};
};

class EngineSource final : public AsyncErrorSource {
 public:
  explicit EngineSource(Engine& engine) : engine_(engine) {}
  ~EngineSource() override { ++engine_.dropped; }
  std::exception_ptr error() noexcept override {
    ++engine_.queries;
    return engine_.answer;
  }
  bool confirm() noexcept override {
    ++engine_.confirmations;
    return engine_.decided;
  }
  bool has_succeeded() const noexcept override { return engine_.succeeded; }

 private:
  Engine& engine_;
};

// Return a pending future whose async error source is `engine`.
FuturePtr of(Engine& engine) {
  FuturePtr future = pending();
  future->add_async_errors(std::make_shared<EngineSource>(engine));
  return future;
}

}  // namespace

TEST_SUITE_BEGIN("async error source");

TEST_CASE_FIXTURE(Rules, "a future queries its source only after it is done") {
  Engine engine;
  const FuturePtr future = of(engine);
  CHECK_FALSE(future->device_work_finished());
  CHECK(future->late_error() == nullptr);
  CHECK(engine.queries == 0);
  future->complete({});
  CHECK(engine.queries == 0);
  CHECK(future->device_work_finished());
  CHECK(engine.queries == 1);
  CHECK(future->late_error() == nullptr);
  CHECK(engine.queries == 2);
}

TEST_CASE_FIXTURE(Rules, "a failure that the engine reports after completion becomes the late error") {
  Engine engine;
  const FuturePtr future = of(engine);
  future->complete(Value::of_native(7));
  CHECK(future->late_error() == nullptr);
  engine.answer = failure("the other rank died");
  SUBCASE("the late error is read") { CHECK(future->late_error() == engine.answer); }
  SUBCASE("the device is queried") { CHECK(future->device_work_finished()); }
  CHECK(future->late_error() == engine.answer);
  CHECK(future->state() == State::completed);
  CHECK(future->value().native.toInt() == 7);
}

TEST_CASE_FIXTURE(Rules, "after a late error the device work counts as finished") {
  const FreshAccelerator fresh;
  Accelerator::get().launch(stream(0, 0));
  Engine engine;
  const FuturePtr future = of(engine);
  future->complete({}, EventSet::record(device(0)));
  CHECK_FALSE(future->device_work_finished());
  engine.answer = failure("aborted");
  CHECK(future->device_work_finished());
  CHECK(future->late_error() == engine.answer);
}

TEST_CASE_FIXTURE(Rules, "a source must confirm success only after the device work has finished") {
  const FreshAccelerator fresh;
  Accelerator::get().launch(stream(0, 0));
  Engine engine;
  const FuturePtr future = of(engine);
  future->complete({}, EventSet::record(device(0)));
  CHECK_FALSE(future->device_work_finished());
  CHECK(engine.confirmations == 0);
  Accelerator::get().finish_all();
  CHECK(future->device_work_finished());
  CHECK(engine.confirmations == 1);
}

TEST_CASE_FIXTURE(Rules, "device work counts as finished only when its source has decided") {
  const FreshAccelerator fresh;
  Engine engine;
  engine.decided = false;
  const FuturePtr future = of(engine);
  future->complete({}, EventSet::record(device(0)));
  Accelerator::get().finish_all();
  CHECK_FALSE(future->device_work_finished());
  SUBCASE("the operation succeeded") {
    engine.decided = true;
    CHECK(future->device_work_finished());
    CHECK(future->late_error() == nullptr);
  }
  SUBCASE("the operation failed") {
    engine.answer = failure("aborted");
    CHECK(future->device_work_finished());
    CHECK(future->late_error() == engine.answer);
  }
}

TEST_CASE_FIXTURE(Rules, "an error that the source finds in confirm() is reported at once") {
  const FreshAccelerator fresh;
  struct Aborted final : AsyncErrorSource {
    std::exception_ptr error() noexcept override { return found; }
    bool confirm() noexcept override {
      found = failure("aborted");
      return true;
    }
    std::exception_ptr found;
  };
  const FuturePtr future = pending();
  future->add_async_errors(std::make_shared<Aborted>());
  future->complete({}, EventSet::record(device(0)));
  Accelerator::get().finish_all();
  CHECK(future->device_work_finished());
  CHECK(future->late_error() != nullptr);
}

TEST_CASE_FIXTURE(Rules, "a future that inherits several sources reports any failure") {
  Engine first;
  Engine second;
  const FuturePtr parents[] = {of(first), of(second)};
  const FuturePtr child = pending();
  for (const FuturePtr& parent : parents) {
    child->inherit_async_errors(*parent);  // ignored, because the parent is still pending
    parent->complete({});
    child->inherit_async_errors(*parent);
    child->inherit_async_errors(*parent);
  }
  const FuturePtr grandchild = pending();
  child->complete({});
  grandchild->inherit_async_errors(*child);
  grandchild->complete({});
  CHECK(grandchild->late_error() == nullptr);
  second.answer = failure("aborted");
  CHECK(grandchild->late_error() == second.answer);
  CHECK(child->late_error() == second.answer);
  CHECK(parents[0]->late_error() == nullptr);
}

TEST_CASE_FIXTURE(Rules, "sources that have succeeded are not inherited") {
  Engine engine;
  const FuturePtr parent = of(engine);
  parent->complete({});
  engine.succeeded = true;
  const FuturePtr child = pending();
  child->inherit_async_errors(*parent);
  child->complete({});
  engine.queries = 0;
  CHECK(child->late_error() == nullptr);
  CHECK(engine.queries == 0);
}

TEST_CASE_FIXTURE(Rules, "a source that is added to a done future is ignored") {
  Engine engine;
  const FuturePtr future = pending();
  future->complete({});
  future->add_async_errors(std::make_shared<EngineSource>(engine));
  CHECK(engine.dropped == 1);
  CHECK(future->device_work_finished());
  CHECK(engine.queries == 0);
}

TEST_CASE_FIXTURE(Rules, "a when_ready callback runs on an error before device completion") {
  const FreshAccelerator fresh;
  Accelerator::get().launch(stream(0, 0));
  // A source that reports the error at the second query, when the callback is watched.
  struct Later final : AsyncErrorSource {
    std::exception_ptr error() noexcept override { return ++queries > 1 ? failure("aborted") : nullptr; }
    int queries = 0;  // used by one thread at a time
  };
  const FuturePtr future = pending();
  future->add_async_errors(std::make_shared<Later>());
  future->complete({}, EventSet::record(device(0)));
  Signal ran;
  future->attach(call([&](Future&) { ran.send(); }, Continuation::when_ready));
  ran.wait();
  settle_watcher();
  CHECK(future->late_error() != nullptr);
}

TEST_CASE_FIXTURE(Rules, "the first late error stays, from the engine or from set_late_error()") {
  Engine engine;
  const FuturePtr future = of(engine);
  future->complete({});
  const std::exception_ptr first = failure("first");
  SUBCASE("from the engine") {
    engine.answer = first;
    CHECK(future->late_error() == first);
    future->set_late_error(failure("second"));
  }
  SUBCASE("from set_late_error()") {
    future->set_late_error(first);
    engine.answer = failure("second");
  }
  CHECK(future->device_work_finished());
  CHECK(future->late_error() == first);
}

TEST_CASE_FIXTURE(Rules, "many threads may query a source at the same time") {
  for (int round = 0; round < 50; ++round) {
    Engine engine;
    const FuturePtr future = of(engine);
    engine.answer = failure("once");
    future->complete({});
    together(4, [&](int thread) {
      if (thread % 2 == 0) {
        CHECK(future->device_work_finished());
      } else {
        CHECK(future->late_error() == engine.answer);
      }
    });
  }
}

TEST_CASE_FIXTURE(Rules, "the last future that has a source drops it") {
  Engine engine;
  FuturePtr future = of(engine);
  future->complete({});
  FuturePtr child = pending();
  child->inherit_async_errors(*future);
  {
    const Inside inside;
    future->clear();
  }
  CHECK(engine.dropped == 0);
  future->device_work_finished();
  CHECK(engine.queries == 2);
  future.reset();
  CHECK(engine.dropped == 0);
  child.reset();
  CHECK(engine.dropped == 1);
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("origin");

TEST_CASE_FIXTURE(Rules, "a future keeps its origin object until the future is destroyed") {
  bool destroyed = false;
  FuturePtr future = pending();
  CHECK(future->origin() == nullptr);
  Foreign origin = object([&] { destroyed = true; });
  void* const raw = origin.get();
  future->set_origin(std::move(origin));
  CHECK(future->origin() == raw);
  future->complete({});
  CHECK(future->origin() == raw);
  CHECK_FALSE(destroyed);
  SUBCASE("inside the runtime") {
    const Inside inside;
    future.reset();
    CHECK(destroyed);
  }
  SUBCASE("outside the runtime") {
    on_engine_thread([&] { future.reset(); });
  }
  settle_callback_thread();
  CHECK(destroyed);
}

TEST_CASE_FIXTURE(Rules, "visit() reports the origin, and clear() drops it") {
  const Inside inside;
  const FuturePtr future = pending();
  bool destroyed = false;
  // The destruction of an object can run any code, so it must not happen under the future's lock.
  Foreign origin = object([&] {
    destroyed = true;
    CHECK_FALSE(future->detach(nullptr));
  });
  void* const raw = origin.get();
  future->set_origin(std::move(origin));
  std::vector<void*> seen;
  const ForeignVisitor all{[](void* reference, void* into) {
                             static_cast<std::vector<void*>*>(into)->push_back(reference);
                             return 0;
                           },
                           &seen};
  CHECK(future->visit(all) == 0);
  CHECK(seen == std::vector{raw});
  const ForeignVisitor stops{[](void*, void*) { return 42; }, nullptr};
  CHECK(future->visit(stops) == 42);
  future->clear();
  CHECK(destroyed);
  CHECK(future->origin() == nullptr);
  seen.clear();
  CHECK(future->visit(all) == 0);
  CHECK(seen.empty());
}

TEST_SUITE_END();
