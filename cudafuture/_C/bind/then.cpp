// Callbacks: then(), then_async(), add_done_callback() and submit().
//
//     parent done ──► CompletionQueue (or an executor) ──► Then::run
//                                                            │  executor=: submit a Job, which comes back to ──┐
//                                                            ▼                                                 │
//                                               child.start(), the caller's context, streams  ◄────────────────┘
//                                                            │
//                                                            ▼
//                                             fn(parent) ──► child done  (then_async: when fn's future is)
#include <optional>
#include <string>
#include <utility>

#include "bind/errors.h"
#include "bind/executors.h"
#include "bind/future.h"
#include "bind/job.h"
#include "bind/order.h"
#include "bind/stream_choice.h"
#include "core/callback_thread.h"
#include "core/completion_queue.h"
#include "core/future.h"
#include "core/pinned_memory.h"
#include "core/process.h"
#include "core/stream_order.h"
#include "core/stream_pool.h"
#include "core/watcher.h"

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

// A callback with a child future (then), or without one (add_done_callback).
class Then final : public Continuation, public Deferred {
 public:
  Then(nb::object fn, nb::object child) : Continuation(foreign), fn_(std::move(fn)), child_(std::move(child)) {}

  void capture_context() {
    caller_ = CallerContext::capture();
    contextvars_ = nb::steal(PyContext_CopyCurrent());
    if (!contextvars_.is_valid()) throw nb::python_error();
  }

  void run(Future& parent) noexcept override {
    if (python_executor.is_valid()) {
      hand_over(std::move(python_executor), this, parent);
      return;
    }
    execute(parent);
    delete this;
  }

  void abandon() noexcept override {
    if (child_.is_valid()) {
      break_promise(child_);
    } else if (refusal_ != nullptr && !is_finalizing() && !is_forked_child()) {
      const nb::error_scope raised_already;
      log_error("a callback of %r was not run", wrap(parent), exception_of(refusal_));
    }
    delete this;
  }

  bool is_moot() const noexcept override { return child_.is_valid() && core_of(child_).done(); }

  int visit(ForeignVisitor visitor) const override {
    for (PyObject* o : {fn_.ptr(), child_.ptr(), contextvars_.ptr(), python_executor.ptr()}) {
      if (const int stop = visitor(o)) return stop;
    }
    return 0;
  }

  // Compares by identity, because no Python code may run under the future's lock.
  bool is_callback_of(nb::handle fn) const { return !child_.is_valid() && fn_.is(fn); }

  // Runs the callback itself, on any thread.
  void execute(Future& parent) noexcept override {
    const ParkingScope parking;
    Future* child = child_.is_valid() ? &core_of(child_) : nullptr;
    if (child != nullptr && !child->start()) return;  // cancelled before it began
    join_host_clock_of(parent);
    const FuturePtr traced = child != nullptr ? wrapped_core(child_) : FuturePtr();
    trace(TraceEvent::callback_begin, child != nullptr ? *child : parent);
    try {
      relax_library_thread();
      call(parent, child);
    } catch (nb::python_error& e) {
      failed(parent, child, nb::borrow(e.value()), {});
    } catch (...) {
      failed(parent, child, exception_of(std::current_exception()), {});
    }
    trace(TraceEvent::callback_end, child != nullptr ? *child : parent);
  }

  void dispose() noexcept override { delete this; }

  bool refuse(const std::exception_ptr& error) noexcept override {
    if (!child_.is_valid()) {
      refusal_ = error;
      return false;
    }
    core_of(child_).fail(Value::of_error(error));  // native: this thread may be outside the interpreter
    return true;
  }

  // Called when the executor will not run it: the executor was shut down, or (with an error) could not.
  void refuse() noexcept override {
    if (child_.is_valid()) core_of(child_).cancel();
  }
  void refuse(Future& parent, nb::object error) noexcept override {
    failed(parent, child_.is_valid() ? &core_of(child_) : nullptr, std::move(error), {});
  }

  nb::object python_executor;
  StreamChoice choice;
  bool async = false;
  bool plain_call = false;      // submit(): call fn(), not fn(parent)
  bool is_wake_up = false;      // fn uses no device: a stream that waited for it would join a capture needlessly
  bool names_executor = false;  // of concurrent.futures: the caller that chose it answers for the order
  bool is_unordered = false;    // attached in a callback that has no order
  bool after_devices = false;   // non_blocking=False

 private:
  static FuturePtr wrapped_core(nb::handle future) { return nb::inst_ptr<PyFuture>(future)->core; }

  // In virtual time, the callback runs after its attachment and after the parent's completion, and after the devices if
  // it follows them. The watcher, which saw the devices finish, is another thread, so this thread queries them again.
  void join_host_clock_of(Future& parent) const noexcept {
    if (!has_host_clock()) return;
    join_host_time(attached_at_);
    join_host_time(parent.completed_at());
    if (after_devices && stands(SyncEdge::then_when_ready)) parent.device_work_finished();
  }

  void call(Future& parent, Future* child) {
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
  CallbackOrder::Kind order_in(const Future& parent) const noexcept {
    if (is_unordered) return CallbackOrder::by_completion();
    if (executor != nullptr && executor == SerialQueue::current()) return CallbackOrder::in_serial_queue();
    if (plain_call) return CallbackOrder::program();
    if (OrderedExecutor* usual = parent.ordered_executor()) return CallbackOrder::beside(*usual);
    return names_executor ? CallbackOrder::program() : CallbackOrder::by_completion();
  }

  nb::object invoke(Future& parent, Future* child) {
    std::optional<RunningChild> running;
    if (child != nullptr) running.emplace(*child);
    if (plain_call) return nb::steal(call_python(fn_.ptr(), nullptr));
    const nb::object argument = wrap(FuturePtr::unsafe_reclaim_from_nonowning(&parent));
    return nb::steal(call_python(fn_.ptr(), argument.ptr()));
  }

  void deliver(Future& parent, Future* child, nb::object result) {
    if (child == nullptr) return;
    child->inherit_async_errors(parent);
    if (!async) {
      complete(*child, std::move(result), {}, {}, SyncEdge::then_record);
      return;
    }
    Future* inner = core_of_or_null(result);
    if (inner == nullptr) {
      const std::string message = "the callback of then_async() returns a CUDAFuture, not " +
                                  std::string(nb::repr(result).c_str()) + "; use then() for a plain value";
      PyErr_SetString(PyExc_TypeError, message.c_str());
      failed(parent, child, take_current_exception(), {});
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
    child->give_back();  // no code of it runs any more: it may be cancelled while it waits
    inner->attach(make_forward(child_));
  }

  void failed(Future& parent, Future* child, nb::object exception, const std::vector<c10::Stream>& streams) noexcept {
    try {
      const bool is_exit = keep_if_interrupt(exception);
      if (child != nullptr) {
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

  nb::object fn_;
  nb::object child_;
  nb::object contextvars_;
  CallerContext caller_;
  const HostTime attached_at_ = host_time();
  std::exception_ptr refusal_;  // of a callback without a child: no thread could be started to run it
};

void expect_callable(nb::handle fn, const char* who) {
  if (PyCallable_Check(fn.ptr()) != 0) return;
  const std::string message = std::string(who) + " takes a callable that takes the future, not " + nb::repr(fn).c_str();
  throw nb::type_error(message.c_str());
}

// executor=: an executor of this library goes into the continuation, one of concurrent.futures into the callback.
void choose_executor(Then& then, nb::handle executor, Executor* usual) {
  then.is_unordered = CallbackOrder::current().is_unordered();
  if (executor.is_none()) {
    then.executor = usual;
    return;
  }
  if (HostExecutor* host = host_executor_or_null(executor)) {
    then.executor = host->executor;
    return;
  }
  if (!nb::hasattr(executor, "submit")) {
    const std::string message =
        "executor is None, cudafuture.executors.inline or .callback_thread, or a "
        "concurrent.futures.Executor, not " +
        std::string(nb::repr(executor).c_str());
    throw nb::type_error(message.c_str());
  }
  if (nb::cast<std::string>(executor.type().attr("__module__")) == "concurrent.futures.process") {
    throw nb::type_error(
        "a ProcessPoolExecutor cannot run callbacks: neither they nor the future can be sent to another process; give "
        "its submit() the function itself, and complete a CUDAFuture in the add_done_callback() of its future");
  }
  then.python_executor = nb::borrow(executor);
  then.names_executor = true;
}

// The child does not inherit lifetime="hold". Its callback allocates on pool streams, so holding references is not
// enough for its memory.
FuturePtr make_child(const Future& parent, int priority) {
  auto child = c10::make_intrusive<Future>(priority);
  if (parent.is_bounded()) child->set_bounding_set(parent.bounding_set());
  if (!parent.name().empty()) child->set_name(parent.name());
  return child;
}

// Returns the executor of the child's callbacks: the ordered executor of its own callback, otherwise the parent's. The
// result of a then_async() is one step deeper, with its own order.
Executor* usual_executor(const Future& parent, const Then& then) {
  OrderedExecutor* order = then.executor != nullptr ? then.executor->ordered() : nullptr;
  if (order == nullptr) order = parent.ordered_executor();
  if (order == nullptr) return parent.default_executor();
  return then.async ? &order->deeper() : order;
}

}  // namespace

nb::object then(nb::handle future, nb::handle fn, std::optional<int> priority, nb::handle stream, nb::handle executor,
                bool non_blocking, bool async) {
  const ParkingScope parking;
  Future& parent = expect_future(future, async ? "then_async()" : "then()");
  refuse_after_fork();
  expect_callable(fn, async ? "then_async()" : "then()");
  nb::object child = wrap(make_child(parent, expect_priority(priority.value_or(parent.priority()))));
  auto then = std::make_unique<Then>(nb::borrow(fn), child);
  then->choice = stream_choice_from(parent, stream);
  then->async = async;
  choose_executor(*then, executor, parent.default_executor());
  if (Executor* usual = usual_executor(parent, *then)) core_of(child).set_default_executor(usual);
  then->capture_context();
  then->after_devices = !non_blocking;
  if (!non_blocking) then->flags |= Continuation::when_ready;
  parent.attach(then.release());
  raise_kept_interrupt();
  return child;
}

nb::object submit(nb::object call, nb::handle executor, int priority, const std::string& name) {
  const ParkingScope parking;
  refuse_after_fork();
  auto parent = c10::make_intrusive<Future>(expect_priority(priority));
  auto core = c10::make_intrusive<Future>(priority);
  core->set_name(name);
  nb::object child = wrap(std::move(core));
  auto then = std::make_unique<Then>(std::move(call), child);
  then->plain_call = true;
  choose_executor(*then, executor, nullptr);
  then->capture_context();
  parent->complete({});
  parent->attach(then.release());
  raise_kept_interrupt();
  return child;
}

void add_done_callback(nb::handle future, nb::object fn, nb::handle executor) {
  const ParkingScope parking;
  Future& parent = expect_future(future, "add_done_callback()");
  refuse_after_fork();
  expect_callable(fn, "add_done_callback()");
  auto then = std::make_unique<Then>(std::move(fn), nb::object());
  choose_executor(*then, executor, parent.default_executor());
  parent.attach(then.release());
  raise_kept_interrupt();
}

void add_ready_callback(nb::handle future, nb::object fn) {
  const ParkingScope parking;
  Future& parent = core_of(future);
  refuse_after_fork();
  if (!parent.device_work_finished()) {  // the wake-up may come from another thread: raise if it cannot start
    CallbackThread::get().require();
    if (any_device_with_streams()) Watcher::get().require();
  }
  auto then = std::make_unique<Then>(std::move(fn), nb::object());
  then->executor = &InlineExecutor::get();
  then->is_wake_up = true;
  then->flags |= Continuation::when_ready;
  parent.attach(then.release());
  raise_kept_interrupt();
}

int remove_done_callback(nb::handle future, nb::handle fn) {
  const ParkingScope parking;
  if (is_forked_child()) return 0;  // no thread will ever run it
  int removed = 0;
  const auto calls_fn = [&](const Continuation& c) {
    const auto* then = dynamic_cast<const Then*>(&c);
    return then != nullptr && then->is_callback_of(fn);
  };
  Future& parent = expect_future(future, "remove_done_callback()");
  while (Continuation* c = parent.detach_if(calls_fn)) {
    c->abandon();
    ++removed;
  }
  return removed;
}

void bind_executors(nb::module_& m) {
  bind_job(m);
  nb::class_<HostExecutor>(
      m, "HostExecutor",
      "Executor of host callbacks: `inline`, `callback_thread`, or an executor that `serial` returns.")
      .def_ro("name", &HostExecutor::name, "Name for messages.")
      .def("__repr__", [](const HostExecutor& e) { return "<cudafuture.executors." + e.name + ">"; });
}

}  // namespace cudafuture::bind
