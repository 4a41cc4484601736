// The reaper: it drops objects and continuations without recursion. A drop inside a drop is queued.
#include <vector>

#include "callback.h"
#include "core/reaper.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

Callback* abandoned(Callback::Abandon then) { return new Callback({}, Continuation::none, nullptr, std::move(then)); }

}  // namespace

TEST_SUITE_BEGIN("reaper");

TEST_CASE_FIXTURE(Rules, "the reaper accepts an empty list") { reap_continuations(nullptr); }

TEST_CASE_FIXTURE(Rules, "the continuations of a list are abandoned in order") {
  Order order;
  ContinuationList list;
  for (int i = 0; i < 4; ++i) list.push(abandoned([&, i] { order.push_back(i); }));
  reap_continuations(list.take_all());
  CHECK(order == Order{0, 1, 2, 3});
}

TEST_CASE_FIXTURE(Rules, "an object that another object's destruction drops is destroyed after that object") {
  Inside inside;
  Order order;
  reap_foreign(object([&] {
                 reap_foreign(object([&] { order.push_back(2); }).take());
                 order.push_back(1);
               }).take());
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "drops by continuations and by objects wait for the current drop") {
  Inside inside;
  Order order;
  reap_foreign(object([&] {
                 reap_continuations(abandoned([&] {
                   const Foreign last = object([&] { order.push_back(3); });
                   order.push_back(2);
                 }));
                 order.push_back(1);
               }).take());
  CHECK(order == Order{1, 2, 3});
}

TEST_CASE_FIXTURE(Rules, "the queue is empty after each outermost drop") {
  Inside inside;
  int dropped = 0;
  for (int i = 0; i < 3; ++i) {
    reap_foreign(object([&] { ++dropped; }).take());
    CHECK(dropped == i + 1);
  }
}

TEST_CASE_FIXTURE(Rules, "each thread drops its own objects and continuations") {
  Inside inside;
  int dropped = 0;
  reap_foreign(object([&] {
                 std::thread([&] {
                   reap_continuations(abandoned([&] { ++dropped; }));
                   CHECK(dropped == 1);
                 }).join();
               }).take());
  CHECK(dropped == 1);
}

TEST_SUITE_END();
