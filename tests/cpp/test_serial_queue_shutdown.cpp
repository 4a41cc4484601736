// Callbacks of serial queues at the end of a process, each time in a process of its own.
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

// One that is told when nobody will run it.
Callback* doomed(Executor& line) {
  return new Callback([](Future&) { FAIL_CHECK("ran after the end"); }, Continuation::foreign, &line,
                      [] { ++abandoned_count; });
}

}  // namespace

TEST_SUITE_BEGIN("serial_queue_shutdown");

TEST_CASE("alone: callbacks that are ready in a serial queue after the end" * doctest::skip()) {
  SerialQueue& queue = new_serial_queue();
  FuturePtr first = pending();
  first->attach(doomed(queue));
  completed()->attach(doomed(queue));
  SerialQueue& other = new_serial_queue();
  settle(other);
  shut_down();
  CHECK(abandoned_count == 0);
  {
    const Inside inside;
    completed()->attach(doomed(other));
    CHECK(abandoned_count == 1);
    first.reset();  // now the one behind it could run
    CHECK(abandoned_count == 3);
  }
  CHECK_FALSE(CallbackThread::get().has_lost());

  on_engine_thread([&] { completed()->attach(doomed(other)); });
  CHECK(abandoned_count == 3);
  CHECK(CallbackThread::get().has_lost());
  {
    const Inside inside;
    completed()->attach(doomed(other));
    CHECK(abandoned_count == 5);  // with the one that was lost
  }
  CHECK(Callback::alive == 0);
  CHECK(Runtime::take_broken().empty());
}

TEST_CASE_FIXTURE(Rules,
                  "after the end a callback in a serial queue is abandoned inside the runtime, and lost outside") {
  run_alone("alone: callbacks that are ready in a serial queue after the end");
}

TEST_CASE("alone: a callback in a serial queue that runs when the end comes" * doctest::skip()) {
  static Signal end_has_begun;
  SerialQueue& queue = new_serial_queue();
  Order order;
  const FuturePtr done = completed();
  done->attach(call_inside(
      [&](Future&) {
        wait_outside(end_has_begun);
        order.push_back(1);
      },
      &queue));
  done->attach(call_inside(mark(order, 2), &queue));
  shut_down([]() noexcept {
    if (!end_has_begun.sent()) end_has_begun.send();
    return true;
  });
  CHECK(order == Order{1, 2});
  CHECK(Callback::alive == 0);
  CHECK(Runtime::take_broken().empty());
}

TEST_CASE_FIXTURE(
    Rules, "a callback in a serial queue that runs when the end comes finishes, as does what stands ready behind") {
  run_alone("alone: a callback in a serial queue that runs when the end comes");
}

TEST_CASE("alone: a serial queue after the interpreter is gone" * doctest::skip()) {
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

TEST_CASE_FIXTURE(Rules, "a serial queue after the interpreter is gone leaks what stands in it, and ends") {
  run_alone("alone: a serial queue after the interpreter is gone");
}

TEST_SUITE_END();
