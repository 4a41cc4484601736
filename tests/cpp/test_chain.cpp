// Chains of callbacks that are too long for recursion, in threads with a small stack.
#include <stdexcept>

#include "callback.h"
#include "rules.h"
#include "threads.h"

using namespace cudafuture;
using namespace cudafuture::fake;

namespace {

constexpr int kLinks = 1'000'000;
constexpr int kFewer = 100'000;  // forty times the length at which recursion would overflow the stack

int links_alive = 0;  // changed by one thread at a time

// A callback that completes its child with the parent's value plus one. When it is abandoned, it drops or fails the
// child.
class Link final : public Continuation {
 public:
  Link(FuturePtr child, std::uint8_t flags, bool fails) : Continuation(flags), child_(std::move(child)), fails_(fails) {
    ++links_alive;
  }
  ~Link() override { --links_alive; }

  void run(Future& parent) noexcept override {
    const FuturePtr child = std::move(child_);
    delete this;
    if (parent.state() == State::completed) {
      child->complete(Value::of_native(parent.value().native.toInt() + 1));
    } else {
      fail(*child);
    }
  }
  void abandon() noexcept override {
    const FuturePtr child = std::move(child_);
    const bool fails = fails_;
    delete this;
    if (fails) fail(*child);
  }

 private:
  static void fail(Future& child) {
    child.mark_seen();
    child.fail(Value::of_error(nullptr));
  }

  FuturePtr child_;
  bool fails_;
};

struct Chain {
  FuturePtr first = pending();
  FuturePtr last = first;

  explicit Chain(int links, std::uint8_t flags = Continuation::none, bool fails = false) {
    for (int i = 0; i < links; ++i) {
      FuturePtr next = pending();
      last->attach(new Link(next, flags, fails));
      last = std::move(next);
    }
  }
};

}  // namespace

TEST_SUITE_BEGIN("chain");

TEST_CASE_FIXTURE(Rules, "a million links complete and are freed in constant stack") {
  on_small_stack([] {
    Chain chain(kLinks);
    CHECK(chain.first->complete(Value::of_native(0)));
    CHECK(chain.last->done());
    CHECK(chain.last->value().native.toInt() == kLinks);
  });
  CHECK(links_alive == 0);
}

TEST_CASE_FIXTURE(Rules, "a million pending links are dropped in constant stack") {
  on_small_stack([] {
    Inside inside;
    Chain chain(kLinks);
    chain.last.reset();
    chain.first.reset();
    CHECK(links_alive == 0);
  });
}

TEST_CASE_FIXTURE(Rules, "a pending chain dropped by an engine dies on the callback thread") {
  on_small_stack([] {
    EngineThread engine;
    Chain chain(kFewer);
  });
  settle_callback_thread();
  CHECK(links_alive == 0);
}

TEST_CASE_FIXTURE(Rules, "a chain whose first future is dropped fails in constant stack") {
  on_small_stack([] {
    Inside inside;
    Chain chain(kFewer, Continuation::none, true);
    chain.first.reset();
    CHECK(chain.last->state() == State::failed);
    CHECK(links_alive == 0);
  });
}

TEST_CASE_FIXTURE(Rules, "an engine completes a chain of foreign callbacks to the end") {
  FuturePtr last;
  on_engine_thread([&] {
    Chain chain(kFewer, Continuation::foreign);
    last = chain.last;
    chain.first->complete(Value::of_native(0));
  });
  CHECK(last->wait_until(nullptr));
  CHECK(last->value().native.toInt() == kFewer);
  settle_callback_thread();
  CHECK(links_alive == 0);
}

TEST_CASE_FIXTURE(Rules, "a chain of when_ready callbacks completes in constant stack") {
  on_small_stack([] {
    Chain chain(kFewer, Continuation::when_ready);
    chain.first->complete(Value::of_native(0));
    CHECK(chain.last->value().native.toInt() == kFewer);
  });
}

TEST_CASE_FIXTURE(Rules, "mutually owning objects and futures are destroyed in constant stack") {
  on_small_stack([] {
    Inside inside;
    FuturePtr owner = completed();
    for (int i = 0; i < kFewer; ++i) {
      FuturePtr outer = pending();
      outer->complete(Value::of_object(object([inner = std::move(owner)] {})));
      owner = std::move(outer);
    }
    CHECK(Object::alive == kFewer);
    owner.reset();
    CHECK(Object::alive == 0);
  });
}

TEST_SUITE_END();
