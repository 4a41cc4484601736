// The class CUDAFuture: conversion of arguments, calls to the core, conversion of results.
#include "bind/future.h"

#include <nanobind/typing.h>

#include "bind/docs.h"
#include "bind/errors.h"
#include "bind/executors.h"
#include "bind/method_descriptors.h"
#include "bind/torch_future.h"
#include "bind/work.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

PyTypeObject* future_type = nullptr;

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self) || is_forked_child()) return 0;
  const FuturePtr& core = nb::inst_ptr<PyFuture>(self)->core;
  if (core.use_count() != 1) return 0;  // an engine owns it too, and will complete it
  const ForeignVisitor visitor{reinterpret_cast<int (*)(void*, void*)>(visit), arg};
  return core->visit(visitor);
}

int clear(PyObject* self) {
  if (!nb::inst_ready(self)) return 0;
  const FuturePtr& core = nb::inst_ptr<PyFuture>(self)->core;
  if (core.use_count() == 1) core->clear();
  return 0;
}

// The collector calls this for a whole island of garbage before it destroys the first object.
void finalize(PyObject* self) {
  if (!nb::inst_ready(self)) return;
  const ParkingScope parking;
  PyFuture* const future = nb::inst_ptr<PyFuture>(self);
  future->is_garbage = true;
  if (future->core.use_count() == 1 && future->core->claim_failure_report()) log_unseen_failure(*future->core);
}

PyType_Slot future_slots[] = {
    {Py_tp_finalize, reinterpret_cast<void*>(finalize)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(clear)},
    {Py_am_await, reinterpret_cast<void*>(await_slot)},
    {0, nullptr},
};

Lifetime lifetime_from(const char* lifetime) {
  const std::string_view word = lifetime;
  if (word == "record") return Lifetime::record;
  if (word == "hold") return Lifetime::hold;
  throw nb::value_error("lifetime is 'record' or 'hold'");
}

void init(nb::pointer_and_handle<PyFuture> self, nb::handle devices, int priority, const std::string& name,
          const char* lifetime, nb::handle executor) {
  const ParkingScope parking;
  refuse_after_fork();
  auto core = c10::make_intrusive<Future>(expect_priority(priority), lifetime_from(lifetime));
  if (!devices.is_none()) core->set_bounding_set(devices_from(devices));
  if (!name.empty()) core->set_name(name);
  if (!executor.is_none()) {
    const HostExecutor* host = host_executor_or_null(executor);
    if (host == nullptr) {
      const std::string message =
          std::string("CUDAFuture(executor=) is cudafuture.executors.inline, .callback_thread, or None, not ") +
          repr_of(executor);
      throw nb::type_error(message.c_str());
    }
    core->set_default_executor(host->executor);
  }
  if (keeps_sites) keep_site(*core);
  new (self.p) PyFuture(std::move(core), self.h.ptr());
}

// Returns the exception that fails a future: `exc`, or an instance of it if it is a class.
nb::object expect_exception(nb::object exc, const char* who) {
  if (PyExceptionClass_Check(exc.ptr()) != 0) exc = call(exc);
  if (PyExceptionInstance_Check(exc.ptr()) != 0) return exc;
  const std::string message = std::string(who) + " takes an exception, not " + repr_of(exc);
  throw nb::type_error(message.c_str());
}

nb::object completed(nb::object value) {
  const ParkingScope parking;
  refuse_after_fork();
  nb::object future = wrap(c10::make_intrusive<Future>());
  complete(core_of(future), std::move(value));
  raise_kept_interrupt();
  return future;
}

nb::object failed(nb::object exc) {
  const ParkingScope parking;
  refuse_after_fork();
  exc = expect_exception(std::move(exc), "failed()");
  nb::object future = wrap(c10::make_intrusive<Future>());
  fail(core_of(future), std::move(exc));
  return future;
}

// ---- consumer

PyFuture& of(nb::handle self) { return *nb::inst_ptr<PyFuture>(self); }

bool ready(PyFuture& self) {
  const ParkingScope parking;
  Future& future = *self.core;
  if (!future.device_work_finished()) return false;
  refuse_captured(future, "ready()");
  raise_late_error(future);
  future.consumed();  // the device has finished: engines need their memory no longer
  return true;
}

nb::object wait_with(Future& future, bool non_blocking, nb::handle timeout) {
  const ParkingScope parking;
  const Deadline deadline = deadline_in(timeout);
  wait_until_done(future, deadline);
  wait_for_devices(future, non_blocking, deadline);
  return value_or_raise(future);
}

nb::object wait(PyFuture& self, bool non_blocking, nb::handle timeout) {
  const FuturePtr future = self.core;
  return wait_with(*future, non_blocking, timeout);
}

nb::object result(PyFuture& self, nb::handle timeout) {
  const FuturePtr future = self.core;
  return wait_with(*future, false, timeout);
}

nb::object value(PyFuture& self) {
  const ParkingScope parking;
  if (!self.core->done()) {
    raise_error("InvalidStateError", "value(): the future is pending; wait() for it, or ask done() first");
  }
  self.core->observe();
  return value_or_raise(*self.core);
}

nb::object exception(PyFuture& self, nb::handle timeout) {
  const ParkingScope parking;
  const FuturePtr future = self.core;
  const Deadline deadline = deadline_in(timeout);
  wait_until_done(*future, deadline);
  wait_for_devices(*future, false, deadline);
  if (future->state() == State::cancelled) raise_outcome(*future);
  return future->state() == State::failed ? exception_of(*future) : nb::none();
}

bool wait_done(PyFuture& self, nb::handle timeout) {
  const ParkingScope parking;
  const FuturePtr future = self.core;
  return try_wait_until_done(*future, deadline_in(timeout));
}

bool cancel(PyFuture& self, nb::handle msg) {
  const ParkingScope parking;
  refuse_after_fork();
  const FuturePtr future = self.core;
  Value reason;
  if (!msg.is_none()) {
    static Imported cancelled_error{"cudafuture.errors", "CancelledError"};
    nb::object error = call(cancelled_error(), msg);
    add_note(error, future->name());
    reason = Value::of_error(foreign(std::move(error)), {});
  }
  const bool cancelled = future->cancel(std::move(reason));
  raise_kept_interrupt();
  return cancelled;
}

// ---- producer

void set_result(PyFuture& self, nb::object value, nb::handle stream, nb::handle tensors) {
  const ParkingScope parking;
  refuse_after_fork();
  const FuturePtr future = self.core;
  bool first;
  if (stream.is_none() && tensors.is_none()) {
    first = complete(*future, std::move(value));
  } else {
    const std::vector<c10::Stream> streams = streams_from(stream);
    if (const std::string message = outside_bounding_set(*future, devices_of_streams(streams)); !message.empty()) {
      raise_error("DeviceMismatchError", "set_result(stream=): " + message);
    }
    std::optional<std::vector<at::Tensor>> named;
    if (!tensors.is_none()) {
      named.emplace();
      for (nb::handle tensor : nb::iter(tensors)) named->push_back(tensor_from(tensor));
    }
    first = complete(*future, std::move(value), streams, std::move(named));
  }
  if (!first) raise_done_already(*future, "set_result()");
  raise_kept_interrupt();
}

void set_exception(PyFuture& self, nb::object exc) {
  const ParkingScope parking;
  refuse_after_fork();
  exc = expect_exception(std::move(exc), "set_exception()");
  if (PyErr_GivenExceptionMatches(exc.ptr(), PyExc_StopIteration) != 0) {
    throw nb::type_error(
        "set_exception() takes no StopIteration: it would end a generator or a coroutine that waits, without an "
        "error; fail() takes any exception");
  }
  const FuturePtr future = self.core;
  if (!fail(*future, std::move(exc))) raise_done_already(*future, "set_exception()");
  raise_kept_interrupt();
}

// ---- facts

nb::object devices(PyFuture& self) {
  nb::list list;
  for (c10::Device device : self.core->devices()) list.append(device_object(device));
  return nb::tuple(list);
}

nb::object late_error(PyFuture& self) {
  const ParkingScope parking;
  refuse_after_fork();
  return late_error_of(*self.core);
}

// Fails the future with an exception that other code raised, whatever its type. False: the future is done.
bool fail_with(PyFuture& self, nb::object exc) {
  const ParkingScope parking;
  refuse_after_fork();
  exc = expect_exception(std::move(exc), "fail()");
  const FuturePtr future = self.core;
  const bool first = fail(*future, std::move(exc));
  raise_kept_interrupt();
  return first;
}

nb::object released(PyFuture& self) {
  FuturePtr released = self.core->released();
  return released == nullptr ? nb::none() : wrap(std::move(released));
}

}  // namespace

// ---- identity

nb::object wrap(FuturePtr core) {
  auto* known = static_cast<PyObject*>(core->wrapper);
  if (known != nullptr && Py_REFCNT(known) > 0) return nb::borrow(nb::handle(known));
  if (keeps_sites) keep_site(*core);
  nb::object object = nb::inst_alloc(reinterpret_cast<PyObject*>(future_type));
  new (nb::inst_ptr<PyFuture>(object)) PyFuture(std::move(core), object.ptr());
  nb::inst_mark_ready(object);
  return object;
}

Future& core_of(nb::handle future) { return *nb::inst_ptr<PyFuture>(future)->core; }

Future* core_of_or_null(nb::handle object) noexcept {
  return Py_TYPE(object.ptr()) == future_type && nb::inst_ready(object) ? &core_of(object) : nullptr;
}

Future& expect_future(nb::handle object, const char* who) {
  if (Future* future = core_of_or_null(object)) return *future;
  if (const nb::object future = future_of_work(object)) return core_of(future);  // the Work keeps it
  const bool is_several = PyList_Check(object.ptr()) != 0 || PyTuple_Check(object.ptr()) != 0;
  const std::string message = std::string(who) + " takes CUDAFutures, not " + repr_of(object) +
                              (is_several ? "; gather() takes them one by one: gather(*futures)"
                                          : "; CUDAFuture.from_torch() makes one of torch's handles");
  throw nb::type_error(message.c_str());
}

void bind_future(nb::module_& m) {
  auto c = nb::class_<PyFuture>(m, "CUDAFuture", nb::type_slots(future_slots), nb::is_generic(), nb::is_final(),
                                nb::is_weak_referenceable(), docs::future);
  future_type = reinterpret_cast<PyTypeObject*>(c.ptr());
  c.def("__init__", init, nb::arg("devices") = nb::none(), nb::kw_only(), nb::arg("priority") = 0, nb::arg("name") = "",
        nb::arg("lifetime") = "record", nb::arg("executor") = nb::none());
  c.def_static("completed", completed, nb::arg("value").none(), docs::completed);
  c.def_static("failed", failed, nb::arg("exc"), docs::failed);
  c.def_static("from_torch", from_torch, nb::arg("source").none(), docs::from_torch);
  c.def("to_torch", [](nb::handle self) { return to_torch(self); }, docs::to_torch);

  c.def("done", [](PyFuture& self) { return self.core->done(); }, docs::done);
  c.def("ready", ready, docs::ready);
  c.def("wait", wait, nb::kw_only(), nb::arg("non_blocking") = false, nb::arg("timeout") = nb::none(), docs::wait);
  c.def("result", result, nb::arg("timeout") = nb::none(), docs::result);
  c.def("value", value, docs::value);
  c.def("exception", exception, nb::arg("timeout") = nb::none(), docs::exception);
  static const nb::handle pool = nb::steal<nb::str>(PyUnicode_InternFromString("pool")).release();
  const auto def_then = [&](const char* name, bool async, const char* doc) {
    c.def(
        name,
        [async](nb::handle self, nb::handle fn, std::optional<int> priority, nb::handle stream, nb::handle executor,
                bool non_blocking) { return then(self, fn, priority, stream, executor, non_blocking, async); },
        nb::arg("fn").none(), nb::kw_only(), nb::arg("priority") = nb::none(), nb::arg("stream") = pool,
        nb::arg("executor") = nb::none(), nb::arg("non_blocking") = true, doc);
  };
  def_then("then", false, docs::then);
  def_then("then_async", true, docs::then_async);
  c.def(
      "add_done_callback",
      [](nb::handle self, nb::object fn, nb::handle executor) { add_done_callback(self, std::move(fn), executor); },
      nb::arg("fn").none(), nb::kw_only(), nb::arg("executor") = nb::none(), docs::add_done_callback);
  c.def(
      "remove_done_callback", [](nb::handle self, nb::handle fn) { return remove_done_callback(self, fn); },
      nb::arg("fn").none(), docs::remove_done_callback);
  c.def("cancel", cancel, nb::arg("msg") = nb::none(), docs::cancel);
  c.def("running", [](PyFuture& self) { return self.core->running(); }, docs::running);
  c.def("cancelled", [](PyFuture& self) { return self.core->state() == State::cancelled; }, docs::cancelled);

  c.def(
      "set_running_or_notify_cancel", [](PyFuture& self) { return self.core->start(); },
      docs::set_running_or_notify_cancel);
  c.def("set_result", set_result, nb::arg("value").none(), nb::kw_only(), nb::arg("stream") = nb::none(),
        nb::arg("tensors") = nb::none(), docs::set_result);
  c.def("set_exception", set_exception, nb::arg("exc").none(), docs::set_exception);

  c.def_prop_ro("devices", devices, docs::devices);
  c.def_prop_ro("events", [](PyFuture& self) { return events_of(*self.core); }, docs::events);
  c.def_prop_ro("priority", [](PyFuture& self) { return self.core->priority(); }, docs::priority);
  c.def_prop_ro("name", [](PyFuture& self) { return self.core->name(); }, docs::name);
  c.def_prop_ro("late_error", late_error, docs::late_error);
  c.def_prop_rw(
      "released", released, [](PyFuture& self, const PyFuture& released) { self.core->set_released(released.core); },
      docs::released);
  c.def("__repr__", [](PyFuture& self) { return repr(*self.core); });
  use_method_descriptors(
      c, {{"wait", 0, [](nb::handle self, nb::handle) { return wait(of(self), false, nb::none()); }},
          {"result", 0, [](nb::handle self, nb::handle) { return wait(of(self), false, nb::none()); }},
          {"set_result", 1,
           [](nb::handle self, nb::handle value) {
             set_result(of(self), nb::borrow(value), nb::none(), nb::none());
             return nb::object(nb::none());
           }},
          {"then", 1,
           [](nb::handle self, nb::handle fn) { return then(self, fn, std::nullopt, pool, nb::none(), true, false); }},
          {"add_done_callback", 1, [](nb::handle self, nb::handle fn) {
             add_done_callback(self, nb::borrow(fn), nb::none());
             return nb::object(nb::none());
           }}});

  m.def("fail", fail_with, nb::arg("future"), nb::arg("exc"));
  m.def("state", [](const PyFuture& future) { return name_of(future.core->state()); }, nb::arg("future"));
  m.def("wait_done", wait_done, nb::arg("future"), nb::arg("timeout").none());
  m.def(
      "add_ready_callback", [](nb::handle future, nb::object fn) { add_ready_callback(future, std::move(fn)); },
      nb::arg("future"), nb::arg("fn"));
  m.def("submit", submit, nb::arg("call"), nb::arg("executor").none(), nb::arg("priority"), nb::arg("name"));
}

}  // namespace cudafuture::bind
