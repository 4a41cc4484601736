// Callbacks of serial queues at shutdown. Each test has its own process.
#include <atomic>

#include "core/callback_thread.h"
#include "core/process.h"
#include "rules.h"
#include "serial_queues.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

std::atomic<int> abandoned_count{0};

// Return a callback that counts its abandonment and fails the test if it runs.
Callback* expect_abandoned(Executor& queue) {
  return new Callback([](Future&) { FAIL_CHECK("ran after shutdown"); }, Continuation::foreign, &queue,
                      [] { ++abandoned_count; });
}

}  // namespace

TEST_SUITE_BEGIN("serial_queue_shutdown");

TEST_CASE("alone: callbacks that are ready in a serial queue after shutdown" * doctest::skip()) {
  SerialQueue& queue = new_serial_queue();
  FuturePtr first = pending();
  first->attach(expect_abandoned(queue));
  completed()->attach(expect_abandoned(queue));
  SerialQueue& other = new_serial_queue();
  settle(other);
  shut_down();
  CHECK(abandoned_count == 0);
  {
    const Inside inside;
    completed()->attach(expect_abandoned(other));
    CHECK(abandoned_count == 1);
    first.reset();  // the callback behind it becomes the head of the queue
    CHECK(abandoned_count == 3);
  }
  CHECK_FALSE(CallbackThread::get().has_lost());

  on_engine_thread([&] { completed()->attach(expect_abandoned(other)); });
  CHECK(abandoned_count == 3);
  CHECK(CallbackThread::get().has_lost());
  {
    const Inside inside;
    completed()->attach(expect_abandoned(other));
    CHECK(abandoned_count == 5);  // including the lost callback
  }
  CHECK(Callback::alive == 0);
  CHECK(Runtime::take_broken().empty());
}

TEST_CASE_FIXTURE(Rules, "shutdown abandons callbacks inside the runtime and loses them outside") {
  run_alone("alone: callbacks that are ready in a serial queue after shutdown");
}

TEST_CASE("alone: a callback in a serial queue that runs when shutdown begins" * doctest::skip()) {
  static Signal shutdown_has_begun;
  SerialQueue& queue = new_serial_queue();
  Order order;
  const FuturePtr done = completed();
  done->attach(call_inside(
      [&](Future&) {
        wait_outside(shutdown_has_begun);
        order.push_back(1);
      },
      &queue));
  done->attach(call_inside(mark(order, 2), &queue));
  shut_down([]() noexcept {
    if (!shutdown_has_begun.sent()) shutdown_has_begun.send();
    return true;
  });
  CHECK(order == Order{1, 2});
  CHECK(Callback::alive == 0);
  CHECK(Runtime::take_broken().empty());
}

TEST_CASE_FIXTURE(Rules, "running and ready callbacks finish during shutdown") {
  run_alone("alone: a callback in a serial queue that runs when shutdown begins");
}

TEST_CASE("alone: a serial queue after the interpreter has finalized" * doctest::skip()) {
  SerialQueue& queue = new_serial_queue();
  Runtime::set_finalizing(true);
  Callback* const leaked = call_inside([](Future&) { FAIL_CHECK("ran without the runtime"); }, &queue);
  on_engine_thread([&] { completed()->attach(leaked); });
  shut_down();
  Runtime::set_finalizing(false);
  CHECK(queue.length() == 1);
  CHECK(Callback::alive == 1);
  leaked->parent = nullptr;
  delete leaked;
}

TEST_CASE_FIXTURE(Rules, "after finalization a serial queue leaks its callbacks") {
  run_alone("alone: a serial queue after the interpreter has finalized");
}

TEST_SUITE_END();
