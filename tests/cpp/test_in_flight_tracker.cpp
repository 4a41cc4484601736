// In-flight tracker: the calls that a flush or the close of a store waits for, and the failures that it reports.
#include <exception>
#include <memory>
#include <stdexcept>

#include "callback.h"
#include "fake_runtime.h"
#include "rules.h"
#include "store/in_flight_tracker.h"

using namespace cudafuture;
using namespace cudafuture::fake;
using namespace cudafuture::store;

TEST_CASE("in-flight tracker: a flush reports earlier failures that no flush has reported") {
  InFlightTracker tracker;
  const auto begin = [&] {
    const auto call = std::make_shared<Call>();
    call->future = pending();
    tracker.begin(*call);
    return call;
  };
  const auto end = [&](const CallPtr& call, bool fails) {
    if (fails) call->note_failure(std::make_exception_ptr(std::runtime_error("failed")));
    tracker.end(*call);
  };
  const auto failed = [](const FuturePtr& flush) {
    REQUIRE(flush->done());
    flush->mark_seen();
    return flush->state() == State::failed;
  };
  const CallPtr first = begin();
  const FuturePtr one = tracker.flush();
  const CallPtr second = begin();
  const FuturePtr two = tracker.flush();
  const CallPtr third = begin();
  end(third, true);
  end(first, true);
  CHECK(failed(one));
  const FuturePtr three = tracker.flush();  // the first two flushes report both failures
  CHECK_FALSE(two->done());
  const FuturePtr closing = tracker.close();
  CHECK_FALSE(closing->done());
  end(second, false);
  CHECK(failed(two));
  CHECK_FALSE(failed(three));
  CHECK(closing->done());
}
