// The life of a callback, from its future's completion to its child's.
//
//     parent done ──► CompletionQueue (or an executor) ──► Then::run
//                                                            │  executor=: submit a Job, which comes back to ──┐
//                                                            ▼                                                 │
//                                               child.start(), the caller's context, streams  ◄────────────────┘
//                                                            │
//                                                            ▼
//                                             fn(parent) ──► child done  (then_async: when fn's future is)
#include "bind/then.h"

#include <optional>
#include <string>
#include <utility>

#include "bind/errors.h"
#include "bind/submit_pool.h"
#include "bind/work.h"
#include "core/pinned_memory.h"
#include "core/process.h"
#include "core/stream_order.h"
#include "core/thread_activity.h"

namespace cudafuture::bind {
namespace {

// A scope with the settings and the contextvars of the thread that attached the callback. Null changes nothing.
class EnteredContext {
 public:
  EnteredContext(const CallerContext& settings, PyObject* contextvars) : contextvars_(contextvars) {
    if (contextvars_ == nullptr) return;
    if (PyContext_Enter(contextvars_) != 0) throw nb::python_error();
    try {
      settings_.emplace(settings);
    } catch (...) {
      PyContext_Exit(contextvars_);
      throw;
    }
  }
  ~EnteredContext() {
    if (contextvars_ == nullptr) return;
    if (settings_->clears_casts()) {
      const WithoutGil no_gil;
      settings_.reset();
    }
    PyContext_Exit(contextvars_);
  }
  EnteredContext(const EnteredContext&) = delete;
  EnteredContext& operator=(const EnteredContext&) = delete;

 private:
  std::optional<CallerContext::Scope> settings_;
  PyObject* contextvars_;
};

// Returns true for a coroutine that is a generator, from a function with @types.coroutine.
bool is_generator_coroutine(nb::handle result) {
  if (PyGen_CheckExact(result.ptr()) == 0) return false;
  return (nb::cast<int>(result.attr("gi_code").attr("co_flags")) & CO_ITERABLE_COROUTINE) != 0;
}

// Returns true for results that stand for work which may not be done yet: awaitables, futures of any library, Works.
bool is_deferred(nb::handle result) {
  static PyObject* const add_done_callback = PyUnicode_InternFromString("add_done_callback");
  PyTypeObject* const type = Py_TYPE(result.ptr());
  if (type->tp_as_async == nullptr) return false;  // static types of plain values; types made at run time have one
  if (type->tp_as_async->am_await != nullptr || PyAsyncGen_CheckExact(result.ptr()) != 0) return true;
  return is_generator_coroutine(result) || _PyType_Lookup(type, add_done_callback) != nullptr ||
         (PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) != 0 && is_work(result));
}

// Returns the error of a child whose callback returned `result`, and closes a coroutine, which nothing will run.
nb::object unfit_result(nb::object result, const std::string& who) {
  std::string message = "the callback of " + who + " returned " + repr_of(result) + ", ";
  if (PyCoro_CheckExact(result.ptr()) != 0) {
    message +=
        "a coroutine, which nothing would run: call asyncio.run() in a plain function, or await this future in a "
        "coroutine; then_async() takes functions that return a CUDAFuture";
    result.attr("close")();
  } else if (who == "then_async()") {
    message += "which is no CUDAFuture; use then() for a plain value, and CUDAFuture.from_torch() for torch's handles";
  } else {
    message +=
        "which may not be done yet; wait for it in the callback, or use then_async(), whose child takes the "
        "outcome of the CUDAFuture that its callback returns";
  }
  PyErr_SetString(PyExc_TypeError, message.c_str());
  return take_current_exception();
}

}  // namespace

void Then::capture_context() {
  caller_ = CallerContext::capture();
  contextvars_ = nb::steal(PyContext_CopyCurrent());
  if (!contextvars_.is_valid()) throw nb::python_error();
}

void Then::run(Future& parent) noexcept {
  if (child_.is_valid()) core_of(child_).set_pooled(python_executor.is_valid() && is_submit_pool(python_executor));
  if (python_executor.is_valid()) {
    if (child_.is_valid()) core_of(child_).set_dispatched();
    hand_over(std::move(python_executor), this, parent);
    return;
  }
  execute(parent);
  delete this;
}

void Then::abandon() noexcept {
  if (child_.is_valid()) {
    break_promise(child_);
  } else if (refusal_ != nullptr && !is_finalizing() && !is_forked_child()) {
    const nb::error_scope raised_already;
    log_error("a callback of %r was not run", wrap(parent), exception_of(refusal_));
  }
  delete this;
}

int Then::visit(ForeignVisitor visitor) const {
  for (PyObject* o : {fn_.ptr(), child_.ptr(), contextvars_.ptr(), python_executor.ptr()}) {
    if (const int stop = visitor(o)) return stop;
  }
  return 0;
}

void Then::execute(Future& parent) noexcept {
  const ParkingScope parking;
  Future* child = child_.is_valid() ? &core_of(child_) : nullptr;
  if (child != nullptr && !child->start()) return;  // cancelled before it began
  join_host_clock_of(parent);
  try {
    relax_library_thread();
    call(parent, child);
  } catch (nb::python_error& e) {
    failed(parent, child, nb::borrow(e.value()), {});
  } catch (...) {
    failed(parent, child, exception_of(std::current_exception()), {});
  }
}

bool Then::refuse(const std::exception_ptr& error) noexcept {
  if (!child_.is_valid()) {
    refusal_ = error;
    return false;
  }
  core_of(child_).fail(Value::of_error(error));  // native: this thread may be outside the interpreter
  return true;
}

void Then::refuse() noexcept {
  if (child_.is_valid()) core_of(child_).cancel();
}
void Then::refuse(Future& parent, nb::object error) noexcept {
  failed(parent, child_.is_valid() ? &core_of(child_) : nullptr, std::move(error), {});
}

// In virtual time, the callback runs after its attachment and after the parent's completion, and after the devices if
// it follows them. The watcher, which saw the devices finish, is another thread, so this thread queries them again.
void Then::join_host_clock_of(Future& parent) const noexcept {
  if (!has_host_clock()) return;
  join_host_time(attached_at_);
  parent.observe();
  if (after_devices && stands(SyncEdge::then_when_ready)) parent.device_work_finished();
}

void Then::call(Future& parent, Future* child) {
  if ((flags & unwatchable) != 0 && child != nullptr) {  // without a child it wakes a waiter, whose wait() refuses
    raise_error("InvalidStateError",
                "non_blocking=False runs a callback when the device work has finished, but this future was completed "
                "inside a stream capture, whose events the host cannot query; use non_blocking=True");
  }
  const CallbackOrder order(order_in(parent));
  const EnteredContext context(caller_, contextvars_.ptr());
  const bool has_events = !is_wake_up && !parent.events().empty();
  // A device that has reported an error refuses every call; the callback must still run to see the error.
  const bool is_broken = has_events && parent.late_error() != nullptr;
  std::vector<c10::Stream> streams;
  if (!is_wake_up && !is_broken && (has_events || !choice.pool || parent.is_bounded())) {
    streams = streams_for(parent, choice, child != nullptr ? child->priority() : parent.priority());
  }
  const StreamScope scope(streams);
  if (has_events && !is_broken) {
    order_callers_streams(parent, {SyncEdge::then_stream, SyncEdge::then_record_stream});
  }
  nb::object result = invoke(parent, child);
  if (result.is_valid()) {
    deliver(parent, child, std::move(result));
  } else {
    failed(parent, child, take_current_exception(), streams);
  }
}

// Returns the order in which collectives issued in this callback run.
CallbackOrder::Kind Then::order_in(const Future& parent) const noexcept {
  if (is_unordered) return CallbackOrder::by_completion();
  if (executor != nullptr && executor == SerialQueue::current()) return CallbackOrder::in_serial_queue();
  if (plain_call) return CallbackOrder::program();
  if (OrderedExecutor* usual = parent.ordered_executor()) return CallbackOrder::beside(*usual);
  return names_executor ? CallbackOrder::program() : CallbackOrder::by_completion();
}

nb::object Then::invoke(Future& parent, Future* child) {
  const ThreadActivity running(ThreadActivity::Kind::callback, child != nullptr ? *child : parent, fn_.ptr());
  if (plain_call) return nb::steal(call_python(fn_.ptr(), nullptr));
  const nb::object argument = wrap(FuturePtr::unsafe_reclaim_from_nonowning(&parent));
  return nb::steal(call_python(fn_.ptr(), argument.ptr()));
}

void Then::deliver(Future& parent, Future* child, nb::object result) {
  if (child == nullptr) return;
  child->inherit_async_errors(parent);
  if (!async) {
    if (core_of_or_null(result) != &parent && is_deferred(result)) {  // the parent is done
      failed(parent, child, unfit_result(std::move(result), plain_call ? "submit()" : "then()"), {});
      return;
    }
    complete(*child, std::move(result), {}, {}, SyncEdge::then_record);
    return;
  }
  Future* inner = core_of_or_null(result);
  if (inner == nullptr) {
    if (nb::object future = future_of_work(result)) {
      result = std::move(future);
      inner = &core_of(result);
    }
  }
  if (inner == nullptr) {
    failed(parent, child, unfit_result(std::move(result), "then_async()"), {});
    return;
  }
  if (inner == child) {
    failed(parent, child,
           make_error("InvalidStateError",
                      "the callback of then_async() returned its own child: that future would "
                      "wait for itself"),
           {});
    return;
  }
  child->set_pooled(waits_for_pool(*inner));
  child->give_back();  // no code of it runs any more: it may be cancelled while it waits
  inner->attach(make_forward(child_));
}

void Then::failed(Future& parent, Future* child, nb::object exception,
                  const std::vector<c10::Stream>& streams) noexcept {
  try {
    const bool is_exit = keep_if_interrupt(exception);
    if (child != nullptr) {
      const bool is_parents = parent.state() == State::failed && parent.value().object.get() == exception.ptr();
      if (is_parents) Future::share_failure_report(parent, *child);
      if (!fail(*child, exception, streams, SyncEdge::then_failure_record))
        log_error("a callback of %r raised", child_, exception);
    } else if (!is_exit || !is_main_thread()) {
      log_error("a callback of %r raised", wrap(FuturePtr::unsafe_reclaim_from_nonowning(&parent)), exception);
    }
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("cudafuture");
  } catch (...) {
    log_error("a failure could not be delivered to %r", child_, exception_of(std::current_exception()));
  }
}

}  // namespace cudafuture::bind
