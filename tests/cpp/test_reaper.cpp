// Taking things apart without recursion: what is dropped while something is dropped waits its turn.
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

TEST_CASE_FIXTURE(Rules, "an empty list is nothing") { reap_continuations(nullptr); }

TEST_CASE_FIXTURE(Rules, "a list is abandoned in order") {
  Order order;
  ContinuationList list;
  for (int i = 0; i < 4; ++i) list.push(abandoned([&, i] { order.push_back(i); }));
  reap_continuations(list.take_all());
  CHECK(order == Order{0, 1, 2, 3});
}

TEST_CASE_FIXTURE(Rules, "an object dropped by the death of another dies after it, not within it") {
  Inside inside;
  Order order;
  reap_foreign(object([&] {
                 reap_foreign(object([&] { order.push_back(2); }).take());
                 order.push_back(1);
               }).take());
  CHECK(order == Order{1, 2});
}

TEST_CASE_FIXTURE(Rules, "continuations dropped by the death of an object are abandoned after it, and the reverse") {
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

TEST_CASE_FIXTURE(Rules, "after the outermost drop nothing is left, and the next starts anew") {
  Inside inside;
  int died = 0;
  for (int i = 0; i < 3; ++i) {
    reap_foreign(object([&] { ++died; }).take());
    CHECK(died == i + 1);
  }
}

TEST_CASE_FIXTURE(Rules, "each thread takes apart what it drops") {
  Inside inside;
  int died = 0;
  reap_foreign(object([&] {
                 std::thread([&] {
                   reap_continuations(abandoned([&] { ++died; }));
                   CHECK(died == 1);
                 }).join();
               }).take());
  CHECK(died == 1);
}

TEST_SUITE_END();
