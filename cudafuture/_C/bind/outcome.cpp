// Completion of futures, and access to their outcome.
#include <algorithm>

#include "bind/errors.h"
#include "bind/future.h"
#include "bind/job.h"
#include "bind/torch_future.h"
#include "core/completion_queue.h"
#include "core/stream_pool.h"

namespace cudafuture::bind {
namespace {

nb::object list_of_values(nb::handle parts) {
  const Py_ssize_t count = PyTuple_GET_SIZE(parts.ptr());
  nb::object values = nb::steal(PyList_New(count));
  if (!values.is_valid()) throw nb::python_error();
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyList_SET_ITEM(values.ptr(), i, result_of(core_of(PyTuple_GET_ITEM(parts.ptr(), i))).release().ptr());
  }
  return values;
}

// Turns the parts of a gather into the list of their values. Nested gathers are unfolded iteratively, from the inside
// out, so only memory limits the depth.
void unfold(Future& whole) {
  const auto is_folded = [](nb::handle f) { return core_of(f).value().form == Value::Form::parts; };
  std::vector<nb::object> stack{wrap(FuturePtr::unsafe_reclaim_from_nonowning(&whole))};
  while (!stack.empty()) {
    const nb::object top = stack.back();
    Value& value = core_of(top).value();
    if (value.form != Value::Form::parts) {  // another thread has unfolded it, or it is on the stack twice
      stack.pop_back();
      continue;
    }
    const nb::object parts = nb::borrow(nb::handle(static_cast<PyObject*>(value.object.get())));
    const std::size_t before = stack.size();
    for (nb::handle part : nb::borrow<nb::tuple>(parts)) {
      if (is_folded(part)) stack.push_back(nb::borrow(part));
    }
    if (stack.size() > before) continue;
    nb::object values = list_of_values(parts);  // may release the GIL
    if (value.form == Value::Form::parts) {
      value.form = Value::Form::object;
      value.object = foreign(std::move(values));
    }
    stack.pop_back();
  }
}

const std::vector<c10::Stream> kNoStreams;

thread_local PyObject* kept_interrupt = nullptr;

}  // namespace

void add_note(nb::handle exception, const std::string& name) {
  if (name.empty()) return;
  const nb::str note(("in CUDAFuture '" + name + "'").c_str());
  try {
    if (!nb::hasattr(exception, "__notes__")) {
      exception.attr("__notes__") = nb::list();
    } else if (nb::cast<bool>(exception.attr("__notes__").attr("__contains__")(note))) {
      return;
    }
    exception.attr("__notes__").attr("append")(note);
  } catch (...) {
    park_if_unwinding();  // some exception classes accept no attributes: they get no note
  }
}

nb::object result_of(Future& future) {
  Value& value = future.value();
  if (value.form == Value::Form::parts) {
    unfold(future);
  } else if (value.form == Value::Form::native && !value.object) {
    nb::object made = object_of(value.native);
    if (!value.object) value.object = foreign(std::move(made));
  }
  if (!value.object) return nb::none();
  return nb::borrow(nb::handle(static_cast<PyObject*>(value.object.get())));
}

// Lets the origin's `error` method rephrase an engine's error: the origin knows more about it than the engine.
nb::object as_origin_says(void* origin_of_future, nb::object exception) {
  const nb::handle origin = static_cast<PyObject*>(origin_of_future);
  if (!origin.is_valid()) return exception;
  try {
    return origin.attr("error")(exception);
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("cudafuture");
    return exception;
  }
}

nb::object late_error_of(Future& future) {
  const std::exception_ptr late = future.late_error();
  return late == nullptr ? nb::none() : as_origin_says(future.origin(), exception_of(late));
}

nb::object exception_of(Future& future) {
  future.mark_seen();
  return unseen_exception_of(future);
}

nb::object unseen_exception_of(Future& future) {
  Value& value = future.value();
  if (!value.object) {
    nb::object made =
        future.state() == State::cancelled
            ? make_error("CancelledError",
                         future.name().empty() ? "the future was cancelled" : "'" + future.name() + "' was cancelled")
            : exception_of(value.error);
    if (future.origin() != nullptr) {
      made = as_origin_says(future.origin(), std::move(made));
    } else if (future.state() == State::failed) {
      add_note(made, future.name());
    }
    if (!value.object) value.object = foreign(std::move(made));
  }
  return nb::borrow(nb::handle(static_cast<PyObject*>(value.object.get())));
}

// Resets the traceback to its state when the future failed; otherwise it would grow with every wait().
void raise_outcome(Future& future) {
  const nb::object exception = exception_of(future);
  auto* traceback = static_cast<PyObject*>(future.value().traceback.get());
  PyException_SetTraceback(exception.ptr(), traceback != nullptr ? traceback : Py_None);
  raise(exception);
}

nb::object value_or_raise(Future& future) {
  if (future.state() == State::completed) return result_of(future);
  raise_outcome(future);
}

std::string outside_bounding_set(const Future& future, const std::vector<c10::Device>& used) {
  if (!future.is_bounded()) return {};
  const std::vector<c10::Device>& bound = future.bounding_set();
  const auto is_inside = [&](c10::Device d) { return std::find(bound.begin(), bound.end(), d) != bound.end(); };
  if (std::all_of(used.begin(), used.end(), is_inside)) return {};
  return "the value has tensors on " + device_set(used) + ", but the future's devices are " + device_set(bound) +
         "; make the future with all the devices that its value may use, or without devices";
}

namespace {

// Completes with a value that may use devices, or with streams or tensors that the producer named.
[[gnu::noinline]] bool complete_on_devices(Future& future, nb::object object, const std::vector<c10::Stream>& streams,
                                           std::optional<std::vector<at::Tensor>>&& named, SyncEdge record) {
  FoundTensors found;
  try {
    found = find_tensors(object, named.has_value());
  } catch (nb::python_error& e) {  // raising it here would leave the future pending
    const nb::object error = nb::borrow(e.value());
    keep_if_interrupt(error);
    return fail(future, error, streams);
  }
  std::vector<c10::Device>& used = found.devices;
  std::vector<at::Tensor> also = std::move(named).value_or(std::vector<at::Tensor>());
  Value value = Value::of_object(foreign(std::move(object)));
  value.native = std::move(found.search);
  if (used.empty() && also.empty() && streams.empty()) return future.complete(std::move(value));
  if (future.done()) return false;
  const auto add = [&](c10::Device device) {
    if (std::find(used.begin(), used.end(), device) == used.end()) used.push_back(device);
  };
  for (c10::Device device : devices_of(also)) add(device);
  for (const c10::Stream& stream : streams) add(stream.device());  // the producer named them: they have pending work
  if (const std::string message = outside_bounding_set(future, used); !message.empty()) {
    return fail(future, make_error("DeviceMismatchError", message), streams);
  }
  EventSet events;
  try {
    if (stands(record)) events = EventSet::record(used, stands(SyncEdge::result_stream) ? streams : kNoStreams);
  } catch (...) {  // from a device that refuses all work
    park_if_unwinding();
    return fail(future, exception_of(std::current_exception()), streams);
  }
  return future.complete(std::move(value), std::move(events), std::move(also));
}

}  // namespace

bool complete(Future& future, nb::object value, const std::vector<c10::Stream>& streams,
              std::optional<std::vector<at::Tensor>> named, SyncEdge record) {
  if (may_use_devices(value) || named.has_value() || !streams.empty()) {
    return complete_on_devices(future, std::move(value), streams, std::move(named), record);
  }
  return future.complete(Value::of_object(foreign(std::move(value))));
}

// Device work may be pending behind a failure: a consumer that recovers is ordered after that work. A device that
// cannot record an event adds a late error, and never hides the failure itself. A device without a context has no work.
bool fail(Future& future, nb::object exception, const std::vector<c10::Stream>& streams, SyncEdge record) {
  if (future.done()) return false;
  EventSet events;
  std::exception_ptr late;
  std::vector<c10::Device> devices;
  const auto add = [&](c10::Device device) {
    const bool listed = std::find(devices.begin(), devices.end(), device) != devices.end();
    if (!listed && has_streams(device) && has_context(device)) devices.push_back(device);
  };
  for (const c10::Stream& stream : streams) add(stream.device());
  for (c10::Device device : future.bounding_set()) add(device);
  if (stands(record) && !devices.empty()) {
    const WithoutGil released;
    events = EventSet::record_possible(devices, streams, late);
  }
  const bool first = fail_after(future, std::move(exception), std::move(events));
  if (first && late != nullptr) future.set_late_error(late);
  return first;
}

bool fail_after(Future& future, nb::object exception, EventSet events) {
  if (future.done()) return false;
  add_note(exception, future.name());
  Foreign traceback(PyException_GetTraceback(exception.ptr()));
  return future.fail(Value::of_error(foreign(std::move(exception)), std::move(traceback)), std::move(events));
}

void raise_done_already(const Future& future, const char* verb) {
  const std::string who = future.name().empty() ? "the future" : "'" + future.name() + "'";
  raise_error("InvalidStateError", std::string(verb) + ": " + who + " is " + name_of(future.state()) +
                                       " already, and a future is completed once; ask done() first where a "
                                       "cancellation or another producer can be quicker");
}

void keep_interrupt(nb::object exception) {
  if (!is_main_thread() || kept_interrupt != nullptr) return;
  kept_interrupt = exception.release().ptr();
}

// For callers that cannot raise, such as destructors: CPython raises it when it next checks for signals.
void raise_kept_interrupt_soon() noexcept {
  if (kept_interrupt == nullptr || CompletionQueue::current().draining()) return;
  Py_AddPendingCall(
      [](void*) {
        if (kept_interrupt == nullptr) return 0;
        const nb::object interrupt = nb::steal(std::exchange(kept_interrupt, nullptr));
        PyErr_SetObject(interrupt.type().ptr(), interrupt.ptr());
        return -1;
      },
      nullptr);
}

void raise_kept_interrupt() {
  if (kept_interrupt == nullptr || CompletionQueue::current().draining()) return;
  raise(nb::steal(std::exchange(kept_interrupt, nullptr)));
}

}  // namespace cudafuture::bind
