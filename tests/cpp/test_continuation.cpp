// Continuations of a future: when they run, how they are detached, and when they are abandoned.
#include <thread>
#include <vector>

#include "callback.h"
#include "core/future.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

TEST_SUITE_BEGIN("continuation");

TEST_CASE_FIXTURE(Rules, "a continuation runs once, with its parent done, for each outcome") {
  FuturePtr future = pending();
  std::vector<State> seen;
  future->attach(call([&](Future& parent) { seen.push_back(parent.state()); }));
  SUBCASE("completed") {
    future->complete({});
    CHECK(seen == std::vector{State::completed});
  }
  SUBCASE("failed") {
    future->fail(error_value("no"));
    future->mark_seen();
    CHECK(seen == std::vector{State::failed});
  }
  SUBCASE("cancelled") {
    future->cancel();
    CHECK(seen == std::vector{State::cancelled});
  }
  future.reset();
  CHECK(seen.size() == 1);
}

TEST_CASE_FIXTURE(Rules, "a continuation of a done future runs in the attaching thread") {
  const FuturePtr future = completed();
  std::thread::id ran_in;
  future->attach(call([&](Future&) { ran_in = std::this_thread::get_id(); }));
  CHECK(ran_in == std::this_thread::get_id());
}

TEST_CASE_FIXTURE(Rules, "the caller owns a detached continuation, and others keep order") {
  const FuturePtr future = pending();
  std::vector<int> ran;
  Callback* callbacks[5];
  for (int i = 0; i < 5; ++i) {
    callbacks[i] = call([&, i](Future&) { ran.push_back(i); });
    future->attach(callbacks[i]);
  }
  for (const int i : {0, 2, 4}) {  // first, middle, last
    CHECK(future->detach(callbacks[i]));
    CHECK_FALSE(future->detach(callbacks[i]));
    callbacks[i]->abandon();
  }
  future->attach(call([&](Future&) { ran.push_back(5); }));
  future->complete({});
  CHECK(ran == std::vector{1, 3, 5});
  CHECK_FALSE(future->detach(callbacks[1]));
}

TEST_CASE_FIXTURE(Rules, "detach_if() detaches the first continuation that matches") {
  const FuturePtr future = pending();
  Callback* const one = call({});
  Callback* const two = call({}, Continuation::foreign);
  Callback* const three = call({}, Continuation::foreign);
  for (Callback* c : {one, two, three}) future->attach(c);
  const auto is_foreign = [](const Continuation& c) { return (c.flags & Continuation::foreign) != 0; };
  CHECK(future->detach_if(is_foreign) == two);
  CHECK(future->detach_if(is_foreign) == three);
  CHECK(future->detach_if(is_foreign) == nullptr);
  Inside inside;
  two->abandon();
  three->abandon();
  CHECK(future->detach(one));
  one->abandon();
}

TEST_CASE_FIXTURE(Rules, "a destroyed pending future abandons its continuations in order") {
  FuturePtr future = pending();
  std::vector<int> abandoned;
  bool all_inside = true;
  for (int i = 0; i < 3; ++i) {
    future->attach(new Callback({}, Continuation::none, nullptr, [&, i] {
      abandoned.push_back(i);
      all_inside = all_inside && Runtime::inside();
    }));
  }
  SUBCASE("in this thread, if it is inside the runtime") {
    Inside inside;
    future.reset();
    CHECK(abandoned.size() == 3);
  }
  SUBCASE("on the callback thread, if this thread is outside the runtime") {
    future.reset();
    settle_callback_thread();
  }
  CHECK(abandoned == std::vector{0, 1, 2});
  CHECK(all_inside);
}

TEST_SUITE_END();
