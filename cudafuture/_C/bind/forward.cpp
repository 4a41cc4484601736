// Forwarding of an outcome from one future to another, and promises that cannot be kept.
#include <string>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

class Forward final : public Continuation {
 public:
  explicit Forward(nb::object child) : Continuation(foreign), child_(std::move(child)) {}

  void run(Future& inner) noexcept override {
    Future& child = core_of(child_);
    try {
      forward(inner, child);
    } catch (...) {
      fail(child, exception_of(std::current_exception()));
    }
    delete this;
  }

  void abandon() noexcept override {
    break_promise(child_);
    delete this;
  }

  bool refuse(const std::exception_ptr& error) noexcept override {
    core_of(child_).fail(Value::of_error(error));
    return true;
  }

  bool is_moot() const noexcept override { return core_of(child_).done(); }
  Future* dependent() const noexcept override { return &core_of(child_); }
  int visit(ForeignVisitor visitor) const override { return visitor(child_.ptr()); }

 private:
  static void forward(Future& inner, Future& child) {
    if (child.done()) return;  // cancelled, for example: it has not seen the outcome
    child.inherit_host_time(inner);
    if (inner.state() == State::cancelled) {
      inner.mark_seen();
      auto* const reason = static_cast<PyObject*>(inner.value().object.get());
      child.cancel(reason == nullptr ? Value() : Value::of_error(bind::foreign(nb::borrow(reason)), {}));
      return;
    }
    if (inner.state() == State::failed) {
      fail_after(child, exception_of(inner), kept(inner.events(), SyncEdge::then_async_failure_events));
      return;
    }
    if (const std::string message = outside_bounding_set(child, inner.events().devices()); !message.empty()) {
      fail_after(child, make_error("DeviceMismatchError", message), EventSet(inner.events()));
      return;
    }
    child.inherit_async_errors(inner);
    Value value = Value::of_object(bind::foreign(result_of(inner)));
    if (inner.value().form == Value::Form::object) value.native = inner.value().native;
    child.complete(std::move(value), kept(inner.events(), SyncEdge::then_async_events),
                   std::vector<at::Tensor>(inner.named_tensors()));
  }

  nb::object child_;
};

}  // namespace

Continuation* make_forward(nb::object child) { return new Forward(std::move(child)); }

void break_promise(const nb::object& child) noexcept {
  if (Py_REFCNT(child.ptr()) <= 1 || nb::inst_ptr<PyFuture>(child)->is_garbage) return;
  if (is_finalizing() || is_forked_child()) return;
  const ParkingScope parking;
  const nb::error_scope raised_already;  // this may run while any other error unwinds
  try {
    const FuturePtr future = nb::inst_ptr<PyFuture>(child)->core;
    nb::object error =
        make_error("InvalidStateError",
                   is_shut_down() ? "the process is exiting: the callback that would complete this future will not run"
                                  : "the future that this one waits for was dropped before it completed; keep the "
                                    "producer's future alive until it is done");
    future->mark_seen();  // no caller got this error: do not report it as unseen
    future->fail(Value::of_error(foreign(std::move(error)), Foreign()));
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("cudafuture");
  }
  raise_kept_interrupt_soon();
}

}  // namespace cudafuture::bind
