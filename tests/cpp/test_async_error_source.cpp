// Async error sources of a future: the failures that its engine reports after completion.
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

// An engine that answers what it is told, and counts how often it is asked. The test and the future share it.
struct Engine {
  std::exception_ptr answer;
  bool decided = true;
  bool succeeded = false;
  std::atomic<int> asked{0};
  std::atomic<int> confirmed{0};
  std::atomic<int> dropped{0};
};

class Asked final : public AsyncErrorSource {
 public:
  explicit Asked(Engine& engine) : engine_(engine) {}
  ~Asked() override { ++engine_.dropped; }
  std::exception_ptr error() noexcept override {
    ++engine_.asked;
    return engine_.answer;
  }
  bool confirm() noexcept override {
    ++engine_.confirmed;
    return engine_.decided;
  }
  bool has_succeeded() const noexcept override { return engine_.succeeded; }

 private:
  Engine& engine_;
};

FuturePtr of(Engine& engine) {
  FuturePtr future = pending();
  future->add_async_errors(std::make_shared<Asked>(engine));
  return future;
}

}  // namespace

TEST_SUITE_BEGIN("async error source");

TEST_CASE_FIXTURE(Rules, "a source is asked for errors only once its future is done") {
  Engine engine;
  const FuturePtr future = of(engine);
  CHECK_FALSE(future->device_work_finished());
  CHECK(future->late_error() == nullptr);
  CHECK(engine.asked == 0);
  future->complete({});
  CHECK(engine.asked == 0);
  CHECK(future->device_work_finished());
  CHECK(engine.asked == 1);
  CHECK(future->late_error() == nullptr);
  CHECK(engine.asked == 2);
}

TEST_CASE_FIXTURE(Rules, "what the engine learns later becomes the late error, whoever asks first") {
  Engine engine;
  const FuturePtr future = of(engine);
  future->complete(Value::of_native(7));
  CHECK(future->late_error() == nullptr);
  engine.answer = failure("the other rank died");
  SUBCASE("the error is asked for") { CHECK(future->late_error() == engine.answer); }
  SUBCASE("the device is asked for") { CHECK(future->device_work_finished()); }
  CHECK(future->late_error() == engine.answer);
  CHECK(future->state() == State::completed);
  CHECK(future->value().native.toInt() == 7);
}

TEST_CASE_FIXTURE(Rules, "a late error counts as finished device work: nothing more will come") {
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

TEST_CASE_FIXTURE(Rules, "a source decides only after the device work has finished") {
  const FreshAccelerator fresh;
  Accelerator::get().launch(stream(0, 0));
  Engine engine;
  const FuturePtr future = of(engine);
  future->complete({}, EventSet::record(device(0)));
  CHECK_FALSE(future->device_work_finished());
  CHECK(engine.confirmed == 0);
  Accelerator::get().finish_all();
  CHECK(future->device_work_finished());
  CHECK(engine.confirmed == 1);
}

TEST_CASE_FIXTURE(Rules, "finished device work is no success before its source has decided") {
  const FreshAccelerator fresh;
  Engine engine;
  engine.decided = false;
  const FuturePtr future = of(engine);
  future->complete({}, EventSet::record(device(0)));
  Accelerator::get().finish_all();
  CHECK_FALSE(future->device_work_finished());
  SUBCASE("it succeeded") {
    engine.decided = true;
    CHECK(future->device_work_finished());
    CHECK(future->late_error() == nullptr);
  }
  SUBCASE("it failed") {
    engine.answer = failure("aborted");
    CHECK(future->device_work_finished());
    CHECK(future->late_error() == engine.answer);
  }
}

TEST_CASE_FIXTURE(Rules, "an error that the source finds when it decides is reported at once") {
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

TEST_CASE_FIXTURE(Rules, "a future that is made from others reports the failure of any of them") {
  Engine first;
  Engine second;
  const FuturePtr parents[] = {of(first), of(second)};
  const FuturePtr child = pending();
  for (const FuturePtr& parent : parents) {
    child->inherit_async_errors(*parent);  // too early: ignored
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
  engine.asked = 0;
  CHECK(child->late_error() == nullptr);
  CHECK(engine.asked == 0);
}

TEST_CASE_FIXTURE(Rules, "a source that is added to a future that is done is ignored") {
  Engine engine;
  const FuturePtr future = pending();
  future->complete({});
  future->add_async_errors(std::make_shared<Asked>(engine));
  CHECK(engine.dropped == 1);
  CHECK(future->device_work_finished());
  CHECK(engine.asked == 0);
}

TEST_CASE_FIXTURE(Rules, "a callback that waits for the device runs when the engine reports an error instead") {
  const FreshAccelerator fresh;
  Accelerator::get().launch(stream(0, 0));
  // Answers only at the second time: the callback is watched by then.
  struct Later final : AsyncErrorSource {
    std::exception_ptr error() noexcept override { return ++asked > 1 ? failure("aborted") : nullptr; }
    int asked = 0;  // by one thread at a time
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

TEST_CASE_FIXTURE(Rules, "the first late error stays, whether it came from the engine or the device") {
  Engine engine;
  const FuturePtr future = of(engine);
  future->complete({});
  const std::exception_ptr first = failure("first");
  SUBCASE("from the engine") {
    engine.answer = first;
    CHECK(future->late_error() == first);
    future->set_late_error(failure("second"));
  }
  SUBCASE("from elsewhere") {
    future->set_late_error(first);
    engine.answer = failure("second");
  }
  CHECK(future->device_work_finished());
  CHECK(future->late_error() == first);
}

TEST_CASE_FIXTURE(Rules, "a source may be asked by many threads at once") {
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

TEST_CASE_FIXTURE(Rules, "a source is dropped with the last future that has it") {
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
  CHECK(engine.asked == 2);
  future.reset();
  CHECK(engine.dropped == 0);
  child.reset();
  CHECK(engine.dropped == 1);
}

TEST_SUITE_END();

TEST_SUITE_BEGIN("origin");

TEST_CASE_FIXTURE(Rules, "a future knows the object that says what made it, and drops it with itself") {
  bool died = false;
  FuturePtr future = pending();
  CHECK(future->origin() == nullptr);
  Foreign origin = object([&] { died = true; });
  void* const raw = origin.get();
  future->set_origin(std::move(origin));
  CHECK(future->origin() == raw);
  future->complete({});
  CHECK(future->origin() == raw);
  CHECK_FALSE(died);
  SUBCASE("inside the runtime") {
    const Inside inside;
    future.reset();
    CHECK(died);
  }
  SUBCASE("outside") {
    on_engine_thread([&] { future.reset(); });
  }
  settle_callback_thread();
  CHECK(died);
}

TEST_CASE_FIXTURE(Rules, "the origin is shown to the collector, and given up when it clears the future") {
  const Inside inside;
  const FuturePtr future = pending();
  bool died = false;
  // Dropping an object can run any code: it must not happen under the future's lock.
  Foreign origin = object([&] {
    died = true;
    CHECK_FALSE(future->detach(nullptr));
  });
  void* const raw = origin.get();
  future->set_origin(std::move(origin));
  std::vector<void*> seen;
  const ForeignVisitor all{[](void* one, void* into) {
                             static_cast<std::vector<void*>*>(into)->push_back(one);
                             return 0;
                           },
                           &seen};
  CHECK(future->visit(all) == 0);
  CHECK(seen == std::vector{raw});
  const ForeignVisitor stops{[](void*, void*) { return 42; }, nullptr};
  CHECK(future->visit(stops) == 42);
  future->clear();
  CHECK(died);
  CHECK(future->origin() == nullptr);
  seen.clear();
  CHECK(future->visit(all) == 0);
  CHECK(seen.empty());
}

TEST_SUITE_END();
