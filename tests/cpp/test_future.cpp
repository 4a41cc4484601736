// The state machine of a future: its transitions, their effects, and the calls to its producer.
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "callback.h"
#include "core/future.h"
#include "rules.h"
#include "threads.h"

// Format for doctest's messages.
namespace cudafuture {
std::ostream& operator<<(std::ostream& out, TraceEvent event) { return out << static_cast<int>(event); }
}  // namespace cudafuture

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

// A producer that counts its calls.
struct CountingProducer final : Producer {
  bool cancel(Future& future) override {
    ++cancels;
    if (on_cancel) on_cancel(future);
    return agrees;
  }
  void finished(Future& future) noexcept override {
    ++notifications;
    if (on_finished) on_finished(future);
  }
  int visit(ForeignVisitor visitor) const override { return visitor(kept.get()); }

  bool agrees = true;
  int cancels = 0;
  int notifications = 0;
  std::function<void(Future&)> on_cancel;
  std::function<void(Future&)> on_finished;
  Foreign kept;
};

// Take the future's lock: a thread that already holds it deadlocks.
void take_lock_of(Future& future) { CHECK_FALSE(future.detach(nullptr)); }

std::vector<TraceEvent> traced;
std::vector<std::string> unseen;

}  // namespace

TEST_SUITE_BEGIN("future");

TEST_CASE_FIXTURE(Rules, "a new future is pending and has no properties") {
  const FuturePtr future = pending(-1);
  CHECK(future->state() == State::pending);
  CHECK_FALSE(future->done());
  CHECK(future->priority() == -1);
  CHECK(future->lifetime() == Lifetime::record);
  CHECK(future->name().empty());
  CHECK_FALSE(future->is_bounded());
  CHECK(future->bounding_set().empty());
  CHECK(future->devices().empty());
  CHECK(future->default_executor() == nullptr);
  CHECK_FALSE(future->released());
  CHECK(future->late_error() == nullptr);
  CHECK(future->named_tensors().empty());
  CHECK(future->age().count() >= 0);
}

TEST_CASE_FIXTURE(Rules, "a future keeps its properties, and its devices sorted without duplicates") {
  const FuturePtr future = c10::make_intrusive<Future>(3, Lifetime::hold);
  const c10::Device one(c10::DeviceType::PrivateUse1, 1);
  const c10::Device two(c10::DeviceType::PrivateUse1, 2);
  future->set_name("all_reduce of bucket 3");
  future->set_bounding_set({two, one, two});
  future->set_default_executor(&InlineExecutor::get());
  const FuturePtr released = pending();
  future->set_released(released);
  CHECK(future->priority() == 3);
  CHECK(future->lifetime() == Lifetime::hold);
  CHECK(future->name() == "all_reduce of bucket 3");
  CHECK(future->is_bounded());
  CHECK(future->bounding_set() == std::vector{one, two});
  CHECK(future->devices() == std::vector{one, two});
  CHECK(future->default_executor() == &InlineExecutor::get());
  CHECK(future->released().get() == released.get());
}

TEST_CASE_FIXTURE(Rules, "released() returns a future that release() completes, also if release() came first") {
  const FuturePtr early = c10::make_intrusive<Future>(2);
  early->release();  // no effect without a promise
  CHECK_FALSE(early->released());
  early->promise_release();
  const FuturePtr released = early->released();
  CHECK(released->priority() == 2);
  CHECK(released->state() == State::pending);
  CHECK(early->released().get() == released.get());
  early->release();
  early->release();
  CHECK(released->state() == State::completed);

  const FuturePtr late = pending();
  late->promise_release();
  late->release();
  CHECK(late->released()->state() == State::completed);
  CHECK(late->state() == State::pending);
}

TEST_CASE_FIXTURE(Rules, "a future with an empty bounding set is bounded") {
  const FuturePtr future = pending();
  future->set_bounding_set({});
  CHECK(future->is_bounded());
  CHECK(future->bounding_set().empty());
}

TEST_CASE_FIXTURE(Rules, "name_of() returns the name of each state") {
  CHECK(std::string(name_of(State::pending)) == "pending");
  CHECK(std::string(name_of(State::completed)) == "completed");
  CHECK(std::string(name_of(State::failed)) == "failed");
  CHECK(std::string(name_of(State::cancelled)) == "cancelled");
}

TEST_CASE_FIXTURE(Rules, "the first outcome of a future is final") {
  const FuturePtr future = pending();
  bool first = false;
  State outcome = State::pending;
  SUBCASE("completed") {
    first = future->complete(Value::of_native(7));
    outcome = State::completed;
  }
  SUBCASE("completed after it was started") {
    CHECK(future->start());
    first = future->complete(Value::of_native(7));
    outcome = State::completed;
  }
  SUBCASE("failed") {
    first = future->fail(error_value("no"));
    future->mark_seen();
    outcome = State::failed;
  }
  SUBCASE("failed after it was started") {
    CHECK(future->start());
    first = future->fail(error_value("no"));
    future->mark_seen();
    outcome = State::failed;
  }
  SUBCASE("cancelled") {
    first = future->cancel();
    outcome = State::cancelled;
  }
  CHECK(first);
  CHECK(future->state() == outcome);
  CHECK(future->done());
  CHECK_FALSE(future->complete(Value::of_native(8)));
  CHECK_FALSE(future->fail(error_value("too late")));
  CHECK_FALSE(future->start());
  future->give_back();
  future->cancel();
  CHECK(future->state() == outcome);
  CHECK((future->value().native.isInt() && future->value().native.toInt() == 7) == (outcome == State::completed));
  CHECK((future->value().error != nullptr) == (outcome == State::failed));
}

TEST_CASE_FIXTURE(Rules, "cancel() succeeds once") {
  const FuturePtr future = pending();
  CHECK(future->cancel());
  CHECK_FALSE(future->cancel());
  CHECK(future->state() == State::cancelled);
}

TEST_CASE_FIXTURE(Rules, "a started future cannot be cancelled until give_back()") {
  const FuturePtr future = pending();
  CHECK(future->start());
  CHECK_FALSE(future->cancel());
  CHECK_FALSE(future->done());
  future->give_back();
  CHECK(future->cancel());
  CHECK(future->state() == State::cancelled);
}

TEST_CASE_FIXTURE(Rules, "a value for a done future is dropped") {
  const FuturePtr future = completed();
  bool destroyed = false;
  {
    Inside inside;
    CHECK_FALSE(future->complete(Value::of_object(object([&] { destroyed = true; }))));
  }
  CHECK(destroyed);
}

TEST_CASE_FIXTURE(Rules, "cancel() of a future calls the producer, which can refuse") {
  const FuturePtr future = pending();
  const auto producer = std::make_shared<CountingProducer>();
  producer->agrees = false;
  future->set_producer(producer);
  CHECK_FALSE(future->cancel());
  CHECK(future->state() == State::pending);
  producer->agrees = true;
  CHECK(future->cancel());
  CHECK(producer->cancels == 2);
  CHECK(producer->notifications == 1);
}

TEST_CASE_FIXTURE(Rules, "cancel() does not call the producer of a started or done future") {
  const FuturePtr future = pending();
  const auto producer = std::make_shared<CountingProducer>();
  future->set_producer(producer);
  future->start();
  CHECK_FALSE(future->cancel());
  future->complete({});
  CHECK_FALSE(future->cancel());
  CHECK(producer->cancels == 0);
}

TEST_CASE_FIXTURE(Rules, "cancel() fails if the producer completes the future in its own cancel()") {
  const FuturePtr future = pending();
  const auto producer = std::make_shared<CountingProducer>();
  producer->on_cancel = [](Future& f) { f.complete(Value::of_native(1)); };
  future->set_producer(producer);
  CHECK_FALSE(future->cancel());
  CHECK(future->state() == State::completed);
}

TEST_CASE_FIXTURE(Rules, "cancel() fails if the producer starts the future in its own cancel()") {
  const FuturePtr future = pending();
  const auto producer = std::make_shared<CountingProducer>();
  producer->on_cancel = [](Future& f) { CHECK(f.start()); };
  future->set_producer(producer);
  CHECK_FALSE(future->cancel());
  CHECK(future->state() == State::pending);
  CHECK(producer->notifications == 0);
  CHECK(future->complete({}));
}

TEST_CASE_FIXTURE(Rules, "the producer's finished() is called once, without the lock") {
  const FuturePtr future = pending();
  auto producer = std::make_shared<CountingProducer>();
  const std::weak_ptr<CountingProducer> alive = producer;
  int notifications = 0;
  bool notified_before_callbacks = false;
  producer->on_finished = [&](Future& f) {
    CHECK(&f == future.get());
    CHECK(f.done());
    take_lock_of(f);
    ++notifications;
  };
  future->attach(call([&](Future&) { notified_before_callbacks = notifications == 1; }));
  future->set_producer(std::move(producer));
  SUBCASE("completed") { future->complete({}); }
  SUBCASE("failed") {
    future->fail(error_value("no"));
    future->mark_seen();
  }
  SUBCASE("cancelled") { future->cancel(); }
  CHECK(notifications == 1);
  CHECK(notified_before_callbacks);
  CHECK(alive.expired());
}

TEST_CASE_FIXTURE(Rules, "finished() is not called if the future is dropped while pending") {
  const auto producer = std::make_shared<CountingProducer>();
  {
    const FuturePtr future = pending();
    future->set_producer(producer);
  }
  CHECK(producer->notifications == 0);
  CHECK(producer.use_count() == 1);
}

TEST_CASE_FIXTURE(Rules, "clear() drops callbacks, producer and objects, and reports no unseen failure") {
  Inside inside;
  set_unseen_failure_hook([](const Future& future, Value&&, Foreign&&) { unseen.push_back(future.name()); });
  unseen.clear();
  int abandoned = 0;
  int destroyed = 0;
  {
    const FuturePtr future = pending();
    future->attach(new Callback({}, Continuation::foreign, nullptr, [&] { ++abandoned; }));
    const auto producer = std::make_shared<CountingProducer>();
    future->set_producer(producer);
    future->clear();
    CHECK(abandoned == 1);
    CHECK(producer.use_count() == 1);

    const FuturePtr failed = pending();
    // The destruction of an object can run any code, so it must not happen under the future's lock.
    const auto destroy = [&destroyed, f = failed.get()] {
      ++destroyed;
      take_lock_of(*f);
    };
    failed->fail(Value::of_error(object(destroy), object(destroy)));
    failed->clear();
    CHECK(destroyed == 2);
    CHECK(failed->state() == State::failed);
  }
  CHECK(unseen.empty());
  set_unseen_failure_hook(nullptr);
}

TEST_CASE_FIXTURE(Rules, "visit() reports every owned reference until the visitor stops") {
  Inside inside;
  const FuturePtr future = pending();
  const auto producer = std::make_shared<CountingProducer>();
  producer->kept = object();
  void* const of_producer = producer->kept.get();
  future->set_producer(producer);
  Callback* const callback = call_inside({});
  callback->kept = object();
  void* const of_callback = callback->kept.get();
  future->attach(callback);

  using Seen = std::vector<void*>;
  Seen seen;
  const ForeignVisitor all{[](void* reference, void* into) {
                             static_cast<Seen*>(into)->push_back(reference);
                             return 0;
                           },
                           &seen};
  CHECK(future->visit(all) == 0);
  CHECK(seen == Seen{of_callback, of_producer});

  seen.clear();
  const ForeignVisitor first{[](void* reference, void* into) {
                               static_cast<Seen*>(into)->push_back(reference);
                               return 42;
                             },
                             &seen};
  CHECK(future->visit(first) == 42);
  CHECK(seen == Seen{of_callback});

  Foreign exception = object();
  Foreign traceback = object();
  const Seen outcome{exception.get(), traceback.get()};
  future->fail(Value::of_error(std::move(exception), std::move(traceback)));
  future->mark_seen();
  seen.clear();
  CHECK(future->visit(all) == 0);
  CHECK(seen == outcome);  // the callback has run, and the producer was dropped
}

TEST_CASE_FIXTURE(Rules, "a destroyed future reports its unseen failure once") {
  set_unseen_failure_hook([](const Future& future, Value&& value, Foreign&&) {
    CHECK(value.error != nullptr);
    unseen.push_back(future.name());
  });
  unseen.clear();
  const auto fails = [](const char* name) {
    FuturePtr future = pending();
    future->set_name(name);
    future->fail(error_value("no"));
    return future;
  };
  fails("unseen");
  CHECK(unseen == std::vector<std::string>{"unseen"});
  fails("seen")->mark_seen();
  completed();
  pending()->cancel();
  pending();
  CHECK(unseen.size() == 1);
  {  // two pairs that share a report each, and then one report
    std::vector<FuturePtr> futures;
    for (const char* name : {"a", "b", "c", "d"}) futures.push_back(fails(name));
    Future::share_failure_report(*futures[0], *futures[1]);
    Future::share_failure_report(*futures[2], *futures[3]);
    Future::share_failure_report(*futures[1], *futures[3]);
    Future::share_failure_report(*futures[3], *futures[0]);
    futures[0]->mark_seen();
    unseen.clear();
  }
  CHECK(unseen.size() == 1);
  set_unseen_failure_hook(nullptr);
}

TEST_CASE_FIXTURE(Rules, "a future keeps its first late error") {
  const FuturePtr future = completed();
  const auto first = std::make_exception_ptr(std::runtime_error("first"));
  future->set_late_error(first);
  future->set_late_error(std::make_exception_ptr(std::runtime_error("second")));
  CHECK(future->late_error() == first);
  CHECK(future->state() == State::completed);
}

TEST_CASE_FIXTURE(Rules, "the trace hook is called at creation and end, without the lock") {
  traced.clear();
  trace_hook = [](TraceEvent event, const Future& future, const TraceDetail&) {
    traced.push_back(event);
    if (event == TraceEvent::done) take_lock_of(const_cast<Future&>(future));
  };
  const FuturePtr future = pending();
  CHECK(traced == std::vector{TraceEvent::created});
  future->complete({});
  future->complete({});
  CHECK(traced == std::vector{TraceEvent::created, TraceEvent::done});
  trace_hook = nullptr;
}

TEST_SUITE_END();
