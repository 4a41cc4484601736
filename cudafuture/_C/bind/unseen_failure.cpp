// The log records of failures that no caller has retrieved.
#include <string>
#include <utility>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/completion_queue.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

// The facts that the record names: the future may be gone by then.
struct UnseenFailure {
  explicit UnseenFailure(const Future& future)
      : name(future.name()), site(future.site()), is_shared(future.shares_failure_report()) {}

  void log(nb::handle exception) const {
    std::string subject = repr_of(nb::str(name.c_str()));
    if (!site.empty()) subject += ", made at " + site + ",";
    log_error(is_shared ? "the exception of CUDAFuture %s was never retrieved; it was combined with futures whose "
                          "exceptions are not logged"
                        : "the exception of CUDAFuture %s was never retrieved",
              nb::str(subject.c_str()), exception);
  }

  std::string name;
  std::string site;
  bool is_shared;  // with other failures, of which this one is logged
};

// Reports the error where Python runs: a future destroyed on an engine's thread passes it to the callback thread.
class UnseenFailureReport final : public Continuation {
 public:
  UnseenFailureReport(const Future& future, Value&& error, Foreign&& origin)
      : Continuation(foreign), failure_(future), error_(std::move(error)), origin_(std::move(origin)) {}
  void run(Future&) noexcept override { report(); }
  void abandon() noexcept override { delete this; }
  void report() noexcept {
    PyObject *type, *value, *traceback;  // this may run inside the destructor of any object
    PyErr_Fetch(&type, &value, &traceback);
    try {
      const nb::object exception = error_.object ? nb::borrow(nb::handle(static_cast<PyObject*>(error_.object.get())))
                                                 : as_origin_says(origin_.get(), exception_of(error_.error));
      failure_.log(exception);
    } catch (nb::python_error& e) {
      e.discard_as_unraisable("cudafuture");
    }
    PyErr_Restore(type, value, traceback);
    delete this;
  }

 private:
  UnseenFailure failure_;
  Value error_;
  Foreign origin_;
};

void report_unseen_failure(const Future& future, Value&& error, Foreign&& origin) {
  if (is_finalizing() || is_forked_child()) return;
  auto* report = new UnseenFailureReport(future, std::move(error), std::move(origin));
  if (foreign_runtime().inside()) {
    report->report();
    return;
  }
  report->parent = c10::make_intrusive<Future>();
  InlineExecutor::get().post(report);
}

}  // namespace

void log_unseen_failure(Future& future) noexcept {
  if (is_finalizing() || is_forked_child()) return;
  const nb::error_scope raised_already;
  try {
    UnseenFailure(future).log(exception_of(future));
  } catch (nb::python_error& e) {
    e.discard_as_unraisable("cudafuture");
  }
}

void log_unseen_failures() {
  if (!Future::any_has_failed()) return;  // looking at every object takes tens of milliseconds
  for (nb::handle object : nb::module_::import_("gc").attr("get_objects")()) {
    Future* const future = core_of_or_null(object);
    if (future != nullptr && future->claim_failure_report()) log_unseen_failure(*future);
  }
}

void bind_unseen_failure(nb::module_& m) {
  set_unseen_failure_hook(report_unseen_failure);
  m.def("keep_sites", [](bool keep) { keeps_sites = keep; }, nb::arg("keep"));
}

}  // namespace cudafuture::bind
