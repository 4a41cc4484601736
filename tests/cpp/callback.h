// Continuations for the tests: they call a function, count their instances, and record a broken rule when they run
// outside the runtime but must not.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <ostream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/continuation.h"
#include "core/future.h"
#include "fake_runtime.h"

// Format for doctest's messages.
namespace cudafuture {
inline std::ostream& operator<<(std::ostream& out, State state) { return out << name_of(state); }
}  // namespace cudafuture

namespace cudafuture::fake {

class Callback final : public Continuation {
 public:
  using Run = std::function<void(Future&)>;
  using Abandon = std::function<void()>;

  explicit Callback(Run run, std::uint8_t flags = none, Executor* executor = nullptr, Abandon abandoned = {})
      : Continuation(flags, executor),
        run_(std::move(run)),
        abandoned_(std::move(abandoned)),
        is_foreign_((flags & foreign) != 0) {
    ++alive;
  }
  ~Callback() override { --alive; }

  void run(Future& parent) noexcept override {
    if (is_foreign_ && !Runtime::inside()) Runtime::broken("a foreign callback ran outside the runtime");
    const Run body = std::move(run_);
    delete this;  // before the body, because a thread that the body wakes may check `alive`
    if (body) body(parent);
  }
  void abandon() noexcept override {
    if (is_foreign_ && !Runtime::inside()) Runtime::broken("a foreign callback was abandoned outside the runtime");
    const Abandon body = std::move(abandoned_);
    delete this;
    if (body) body();
  }
  int visit(ForeignVisitor visitor) const override { return visitor(kept.get()); }

  Foreign kept;  // an object of the runtime that this callback owns

  static inline std::atomic<int> alive{0};

 private:
  Run run_;
  Abandon abandoned_;
  bool is_foreign_;
};

inline Callback* call(Callback::Run run, std::uint8_t flags = Continuation::none, Executor* executor = nullptr) {
  return new Callback(std::move(run), flags, executor);
}

inline Callback* call_inside(Callback::Run run, Executor* executor = nullptr) {
  return new Callback(std::move(run), Continuation::foreign, executor);
}

inline FuturePtr pending(int priority = 0) { return c10::make_intrusive<Future>(priority); }

inline std::vector<FuturePtr> many_pending(int count) {
  std::vector<FuturePtr> futures(static_cast<std::size_t>(count));
  for (FuturePtr& future : futures) future = pending();
  return futures;
}

inline FuturePtr completed(EventSet&& events = {}) {
  FuturePtr future = pending();
  future->complete({}, std::move(events));
  return future;
}

inline Value error_value(const char* what) {
  return Value::of_error(std::make_exception_ptr(std::runtime_error(what)));
}

// Numbers of callbacks in the order in which they ran.
using Order = std::vector<int>;

}  // namespace cudafuture::fake
