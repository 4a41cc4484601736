// Completion-order executor: callbacks run in completion order, on a thread that runs no other callbacks.
#include "core/completion_order_executor.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/callback_thread.h"
#include "fake_device.h"
#include "rules.h"
#include "serial_queues.h"
#include "threads.h"
#include "together.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

CompletionOrderExecutor& new_serial(std::string name) {
  // The executors are never freed. The list keeps them reachable for leak checkers.
  static auto* const executors = new std::vector<CompletionOrderExecutor*>;
  executors->push_back(&CompletionOrderExecutor::make(std::move(name)));
  return *executors->back();
}

}  // namespace

TEST_SUITE_BEGIN("completion_order_executor");

TEST_CASE_FIXTURE(Rules, "callbacks run in the order in which their futures complete") {
  constexpr int kCallbacks = 50;
  CompletionOrderExecutor& serial = new_serial("serial");
  std::vector<FuturePtr> parents = many_pending(kCallbacks);
  Order order;
  for (int i = 0; i < kCallbacks; ++i)
    parents[static_cast<std::size_t>(i)]->attach(call_inside(mark(order, i), &serial));
  Order shuffled(kCallbacks);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(3));
  on_engine_thread([&] {
    for (const int i : shuffled) parents[static_cast<std::size_t>(i)]->complete({});
  });
  settle(serial);
  CHECK(order == shuffled);
}

TEST_CASE_FIXTURE(Rules, "blocking callbacks on other executors do not delay this executor") {
  CompletionOrderExecutor& serial = new_serial("serial");
  CompletionOrderExecutor& other = new_serial("other");
  Signal go_on;
  Executor* const blocked[] = {&CallbackThread::get(), &other};
  for (Executor* const executor : blocked) {
    completed()->attach(call_inside([&](Future&) { wait_outside(go_on); }, executor));
  }
  on_engine_thread([&] { settle(serial); });
  go_on.send();
  for (Executor* const executor : blocked) settle(*executor);
}

TEST_CASE_FIXTURE(Rules, "callbacks of many threads run singly outside serial queues") {
  CompletionOrderExecutor& serial = new_serial("serial");
  int running = 0;
  int count = 0;
  together(4, [&](int) {
    for (int i = 0; i < 100; ++i) {
      const FuturePtr parent = pending();
      parent->attach(call_inside(
          [&](Future&) {
            CHECK(running++ == 0);
            CHECK(SerialQueue::current() == nullptr);
            ++count;
            --running;
          },
          &serial));
      parent->complete({});
    }
  });
  settle(serial);
  CHECK(count == 400);
}

TEST_CASE_FIXTURE(Rules, "a callback that is dropped before it is posted delays no other") {
  CompletionOrderExecutor& serial = new_serial("serial");
  Order order;
  {
    const FuturePtr dropped = pending();
    dropped->attach(call_inside(mark(order, 1), &serial));
  }
  completed()->attach(call_inside(mark(order, 2), &serial));
  settle(serial);
  CHECK(order == Order{2});
}
