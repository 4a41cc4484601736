// Protection against Gloo's uncaught exceptions.
//
// If a peer sends a message that is larger than expected (another shape or dtype), Gloo throws in its own thread.
// Nothing catches the exception, so the process would end. Instead, that thread is stopped where it is. Its groups are
// then dead, their collectives time out, and the message is added to the errors. The thread holds locks that the
// groups' destructors would wait for, so the groups are never destroyed.
#include <cxxabi.h>
#include <pthread.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <string>
#include <typeinfo>

#include "bind/errors.h"
#include "bind/future.h"
#include "core/callback_thread.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

constexpr char kGlooError[] = "N4gloo13EnforceNotMetE";  // gloo::EnforceNotMet: torch installs no header for it

PyObject* on_failure = nullptr;  // takes the message, returns the objects to keep
std::terminate_handler usual = nullptr;

// Calls Python, on the callback thread.
class GlooFailureReport final : public Continuation {
 public:
  explicit GlooFailureReport(std::string message) : Continuation(foreign), message_(std::move(message)) {}
  void run(Future&) noexcept override {
    try {
      call(on_failure, nb::str(message_.c_str())).release();  // never dropped
    } catch (nb::python_error& e) {
      e.discard_as_unraisable("cudafuture");
    }
    delete this;
  }
  void abandon() noexcept override { delete this; }

 private:
  std::string message_;
};

std::string current_message() noexcept {
  try {
    throw;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return {};
  }
}

void terminate() {
  const std::type_info* const type = abi::__cxa_current_exception_type();
  if (type != nullptr && std::strcmp(type->name(), kGlooError) == 0 && !is_forked_child() && !is_shut_down()) {
    auto* report = new GlooFailureReport(current_message());
    report->parent = c10::make_intrusive<Future>();
    CallbackThread::get().post(report);
    for (;;) pause();
  }
  usual();
}

}  // namespace

void bind_gloo(nb::module_& m) {
  m.def(
      "survive_gloo",
      [](nb::object callable) {
        PyObject* const before = std::exchange(on_failure, callable.release().ptr());
        Py_XDECREF(before);
        if (usual == nullptr) usual = std::set_terminate(terminate);
      },
      nb::arg("on_failure"));
}

}  // namespace cudafuture::bind
