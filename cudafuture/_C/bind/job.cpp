#include "bind/job.h"

#include <string>
#include <utility>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/error.h"

namespace cudafuture::bind {
namespace {

// The callable that a concurrent.futures executor gets; it owns a callback that is due. An executor may call it, drop
// it, call it twice, or cancel its own handle while it runs: the callback is taken out once.
class Job {
 public:
  Job(Deferred* callback, FuturePtr parent) : callback_(callback), parent_(std::move(parent)) {}
  ~Job() { refuse({}); }

  void operator()() {
    Deferred* const callback = std::exchange(callback_, nullptr);
    if (callback == nullptr) return;
    callback->execute(*parent_);
    callback->dispose();
    raise_kept_interrupt();
  }

  // Called when the executor's own handle is done. If the job was never called, the handle gives the reason.
  void settle(nb::handle handle) {
    if (callback_ != nullptr)
      refuse(nb::cast<bool>(handle.attr("cancelled")()) ? nb::none() : handle.attr("exception")());
  }

  // Refuses the callback, which will not be called. Without an error its future is cancelled.
  void refuse(nb::object error) {
    Deferred* const callback = std::exchange(callback_, nullptr);
    if (callback == nullptr) {
      if (error.is_valid()) keep_if_interrupt(error);
      return;
    }
    if (error.is_valid() && !error.is_none()) {
      callback->refuse(*parent_, std::move(error));
    } else {
      callback->refuse();
    }
    callback->dispose();
  }

  int visit(ForeignVisitor visitor) const { return callback_ == nullptr ? 0 : callback_->visit(visitor); }

 private:
  Deferred* callback_;
  FuturePtr parent_;
};

int traverse_job(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<Job>(self)->visit({reinterpret_cast<int (*)(void*, void*)>(visit), arg});
}

int clear_job(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<Job>(self)->refuse({});
  return 0;
}

PyType_Slot job_slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_job)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_job)},
    {0, nullptr},
};

// Converts the bare RuntimeError with which concurrent.futures executors refuse work: they, or Python, have shut down,
// or no thread could be started.
nb::object refusal_from(const nb::object& error) {
  const std::string text = nb::str(error).c_str();
  nb::object typed = text.find("can't start new thread") != std::string::npos
                         ? exception_of(std::make_exception_ptr(no_thread("the executor")))
                         : make_error("InvalidStateError", "the executor no longer accepts callbacks: " + text);
  typed.attr("__cause__") = error;
  return typed;
}

}  // namespace

bool keep_if_interrupt(const nb::object& exception) {
  const bool is_exit = PyErr_GivenExceptionMatches(exception.ptr(), PyExc_KeyboardInterrupt) != 0 ||
                       PyErr_GivenExceptionMatches(exception.ptr(), PyExc_SystemExit) != 0;
  if (is_exit) keep_interrupt(exception);
  return is_exit;
}

void hand_over(nb::object executor, Deferred* callback, Future& parent) noexcept {
  try {
    const nb::object job =
        nb::cast(new Job(callback, FuturePtr::unsafe_reclaim_from_nonowning(&parent)), nb::rv_policy::take_ownership);
    try {
      const nb::object handle = executor.attr("submit")(job);
      if (nb::hasattr(handle, "add_done_callback")) handle.attr("add_done_callback")(job.attr("settle"));
    } catch (nb::python_error& e) {
      const nb::object error = nb::borrow(e.value());
      nb::inst_ptr<Job>(job)->refuse(error.type().is(PyExc_RuntimeError) ? refusal_from(error) : error);
    }
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("cudafuture");
  }
}

void bind_job(nb::module_& m) {
  nb::class_<Job>(m, "_Job", nb::type_slots(job_slots)).def("__call__", &Job::operator()).def("settle", &Job::settle);
}

}  // namespace cudafuture::bind
