// Attachment and removal of callbacks: then(), then_async(), submit(), add_done_callback(), remove_done_callback().
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/errors.h"
#include "bind/executors.h"
#include "bind/future.h"
#include "bind/job.h"
#include "bind/submit_pool.h"
#include "bind/then.h"
#include "core/callback_thread.h"
#include "core/process.h"
#include "core/watcher.h"

namespace cudafuture::bind {
namespace {

void expect_callable(nb::handle fn, const char* who) {
  if (PyCallable_Check(fn.ptr()) != 0) return;
  const std::string message = std::string(who) + " takes a callable that takes the future, not " + repr_of(fn);
  throw nb::type_error(message.c_str());
}

// The child does not inherit lifetime="hold". Its callback allocates on pool streams, so holding references is not
// enough for its memory.
FuturePtr make_child(const Future& parent, int priority) {
  auto child = c10::make_intrusive<Future>(priority);
  if (parent.is_bounded()) child->set_bounding_set(parent.bounding_set());
  if (!parent.name().empty()) child->set_name(parent.name());
  if (parent.is_pooled() || parent.maker() >= Maker::gather) child->set_pooled(waits_for_pool(parent));
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

// Runs the callback when the device work has finished. It may then come from another thread of the library: throws if
// that thread cannot start.
void run_when_ready(Future& parent, Then& then) {
  then.flags |= Continuation::when_ready;
  if (parent.device_work_finished()) return;
  CallbackThread::get().require();
  if (any_device_with_streams()) Watcher::get().require();
}

// Returns the function of a callback without a child; null for other continuations.
nb::handle callback_of(const Continuation& c) noexcept {
  const auto* then = dynamic_cast<const Then*>(&c);
  return then == nullptr ? nb::handle() : then->callback();
}

}  // namespace

nb::object running_loop() {
#if PY_VERSION_HEX < 0x030c0000
  // The function takes 40 ns to look here, by a name that it interns first, where no loop has run.
  static PyObject* const key = PyUnicode_InternFromString("__asyncio_running_event_loop__");
  PyObject* const thread_state = PyThreadState_GetDict();
  if (thread_state == nullptr || PyDict_GetItemWithError(thread_state, key) == nullptr) return nb::none();
#endif
  static Imported get_running_loop{"asyncio", "_get_running_loop"};
  PyObject* const get = get_running_loop().ptr();
  if (PyCFunction_CheckExact(get) == 0) return nb::steal(PyObject_CallNoArgs(get));
  return nb::steal(PyCFunction_GET_FUNCTION(get)(PyCFunction_GET_SELF(get), nullptr));  // a third of the time
}

void Then::choose_executor(nb::handle chosen, Executor* usual) {
  is_unordered = CallbackOrder::current().is_unordered();
  if (chosen.is_none()) {
    executor = usual;
    return;
  }
  if (HostExecutor* host = host_executor_or_null(chosen)) {
    executor = host->executor;
    return;
  }
  if (!nb::hasattr(chosen, "submit")) {
    const std::string message =
        "executor is None, cudafuture.executors.inline or .callback_thread, or a "
        "concurrent.futures.Executor, not " +
        repr_of(chosen);
    throw nb::type_error(message.c_str());
  }
  if (nb::cast<std::string>(chosen.type().attr("__module__")) == "concurrent.futures.process") {
    throw nb::type_error(
        "a ProcessPoolExecutor cannot run callbacks: neither they nor the future can be sent to another process; give "
        "its submit() the function itself, and complete a CUDAFuture in the add_done_callback() of its future");
  }
  python_executor = nb::borrow(chosen);
  names_executor = true;
}

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
  core_of(child).set_maker(async ? Maker::then_async : Maker::then);
  then->choose_executor(executor, parent.default_executor());
  if (is_submit_pool(executor)) core_of(child).set_pooled(true);
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
  core->set_maker(Maker::submit);
  nb::object child = wrap(std::move(core));
  auto then = std::make_unique<Then>(std::move(call), child);
  then->plain_call = true;
  then->choose_executor(executor, nullptr);
  core_of(child).set_pooled(is_submit_pool(executor));
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
  then->choose_executor(executor, parent.default_executor());
  if (executor.is_none()) {
    if (const nb::object loop = running_loop(); !loop.is_none()) {
      static Imported loop_executor{"cudafuture._await", "LoopExecutor"};
      then->python_executor = call(loop_executor(), loop);
      then->executor = nullptr;
      then->after_devices = true;
      run_when_ready(parent, *then);
    }
  }
  parent.attach(then.release());
  raise_kept_interrupt();
}

void add_ready_callback(nb::handle future, nb::object fn) {
  const ParkingScope parking;
  Future& parent = core_of(future);
  refuse_after_fork();
  auto then = std::make_unique<Then>(std::move(fn), nb::object());
  then->executor = &InlineExecutor::get();
  then->is_wake_up = true;
  run_when_ready(parent, *then);
  parent.attach(then.release());
  raise_kept_interrupt();
}

int remove_done_callback(nb::handle future, nb::handle fn) {
  const ParkingScope parking;
  if (is_forked_child()) return 0;  // no thread will ever run it
  Future& parent = expect_future(future, "remove_done_callback()");
  // Functions compare by identity. Other callables, such as bound methods, may run Python code to compare, and no such
  // code may run under the future's lock.
  const bool by_identity = PyFunction_Check(fn.ptr()) != 0;
  std::vector<nb::object> candidates;
  parent.detach_if([&](const Continuation& c) {
    const nb::handle callback = callback_of(c);
    if (callback.is_valid() && (!by_identity || callback.is(fn))) candidates.push_back(nb::borrow(callback));
    return false;
  });
  int removed = 0;
  for (const nb::object& candidate : candidates) {
    if (!candidate.equal(fn)) continue;
    Continuation* c = parent.detach_if([&](const Continuation& c) { return callback_of(c).is(candidate); });
    if (c == nullptr) continue;
    c->abandon();
    ++removed;
  }
  return removed;
}

void bind_executors(nb::module_& m) {
  bind_job(m);
  bind_submit_pool(m);
  nb::class_<HostExecutor>(
      m, "HostExecutor",
      "Executor of host callbacks: `inline`, `callback_thread`, or an executor that `serial` returns.")
      .def_ro("name", &HostExecutor::name, "Name for messages.")
      .def("__repr__", [](const HostExecutor& e) { return "<cudafuture.executors." + e.name + ">"; });
}

}  // namespace cudafuture::bind
