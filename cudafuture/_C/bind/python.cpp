#include "bind/python.h"

#include <pthread.h>
#include <unistd.h>

#include <cmath>
#include <exception>
#include <string>

#include "bind/pending.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

// The number of this library's functions that the thread is inside. Zero: an engine's thread (Gloo's) that enters
// Python without the library, to drop a tensor.
[[gnu::tls_model("initial-exec")]] thread_local int entries = 0;  // counted several times for each callback

// The callback thread keeps one thread state for its whole life, so that threading.local works in callbacks.
thread_local PyThreadState* kept_state = nullptr;

bool enter() noexcept {
  if (is_finalizing()) return false;
  ++entries;  // never undone: the thread serves Python
  if (kept_state != nullptr) {
    take_gil(std::exchange(kept_state, nullptr));
  } else {
    PyGILState_Ensure();
  }
  return true;
}

void leave() noexcept { kept_state = PyEval_SaveThread(); }

void retire() noexcept {
  if (kept_state == nullptr || is_finalizing()) return;
  take_gil(std::exchange(kept_state, nullptr));
  PyGILState_Release(PyGILState_UNLOCKED);  // undoes the first enter()
}

// Leaks an object that is dropped while Python finalizes: its type may not exist any more.
void release(void* object) noexcept {
  if (!is_finalizing()) Py_DECREF(static_cast<PyObject*>(object));
}

pthread_t main_thread;

// PyGILState_Check returns true in every thread once the interpreter is gone.
bool is_inside() noexcept {
  if (Py_IsInitialized() == 0 || (is_finalizing() && !is_main_thread())) return false;
  return PyGILState_Check() != 0;
}

// Blocks until the process ends.
[[noreturn]] void park() noexcept {
  for (;;) pause();
}

}  // namespace

ParkingScope::ParkingScope() noexcept { ++entries; }

// During finalization this can be a part of the thread's unwinding.
ParkingScope::~ParkingScope() {
  if (is_finalizing() && !is_main_thread()) park();
  --entries;
}

WithoutGil::~WithoutGil() { take_gil(state_); }

// CPython before 3.14 ends a thread that requests the GIL while the interpreter finalizes, by unwinding its stack. A
// noexcept function parks the thread here instead.
void take_gil(PyThreadState* state) noexcept {
  if (is_finalizing() && !is_main_thread()) park();
  const ParkingScope parking;
  PyEval_RestoreThread(state);
}

void keep_threads_from_unwinding() noexcept {
  static std::terminate_handler usual = nullptr;
  usual = std::set_terminate([] {
    if (entries > 0 && is_finalizing() && !is_main_thread() && std::current_exception() == nullptr) park();
    usual();
  });
}

std::string utf8_of(nb::handle text) {
  Py_ssize_t size = 0;
  if (const char* const utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size))
    return {utf8, static_cast<std::size_t>(size)};
  PyErr_Clear();
  const auto bytes = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

std::string repr_of(nb::handle object) {
  const auto text = nb::steal(PyObject_Repr(object.ptr()));
  if (!text.is_valid()) throw nb::python_error();
  return utf8_of(text);
}

PyObject* call_python(PyObject* callable, PyObject* argument) noexcept {
  return argument == nullptr ? PyObject_CallNoArgs(callable) : PyObject_CallOneArg(callable, argument);
}

PyObject* call_python(PyObject* callable, PyObject* const* arguments, std::size_t count) noexcept {
  const ParkingScope parking;
  return PyObject_Vectorcall(callable, arguments, count, nullptr);
}

void park_if_unwinding() noexcept {
  if (std::current_exception() == nullptr) park();
}

bool is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

bool is_main_thread() noexcept { return pthread_equal(pthread_self(), main_thread) != 0; }

void install_runtime() {
  const nb::object ident = nb::module_::import_("threading").attr("main_thread")().attr("ident");
  main_thread = static_cast<pthread_t>(nb::cast<unsigned long>(ident));
  set_foreign_runtime({
      .inside = is_inside,
      .enter = enter,
      .leave = leave,
      .retire = retire,
      .step_out = []() noexcept -> void* { return is_inside() ? PyEval_SaveThread() : nullptr; },
      .step_in =
          [](void* state) noexcept {
            if (state != nullptr) take_gil(static_cast<PyThreadState*>(state));
          },
      .release = release,
      .describe = describe_function,
  });
  pthread_atfork(nullptr, nullptr, [] { main_thread = pthread_self(); });
}

nb::handle Imported::get() {
  if (object_ == nullptr) object_ = nb::object(nb::module_::import_(module_).attr(name_)).release().ptr();
  return object_;
}

Deadline deadline_in(nb::handle timeout) {
  if (timeout.is_none()) return std::nullopt;
  double seconds = PyFloat_AsDouble(timeout.ptr());
  if (seconds == -1.0 && PyErr_Occurred() != nullptr) {
    const bool is_number = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
    if (!is_number && PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
    PyErr_Clear();
    if (!is_number) {
      const std::string message = "timeout is None (no limit) or a number of seconds, not " + repr_of(timeout);
      throw nb::type_error(message.c_str());
    }
    // an integer too large for a float: no deadline, or a negative one
    seconds = PyObject_RichCompareBool(timeout.ptr(), nb::int_(0).ptr(), Py_LT) != 0 ? -1.0 : 1e300;
  }
  if (std::isnan(seconds) || seconds < 0) {
    const std::string message = "timeout is None (no limit) or seconds >= 0, not " + repr_of(timeout);
    throw nb::value_error(message.c_str());
  }
  if (seconds > 1e9) return std::nullopt;
  return Future::Clock::now() +
         std::chrono::duration_cast<Future::Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace cudafuture::bind
