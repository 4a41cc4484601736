#include "python.h"

#include <pthread.h>
#include <unistd.h>

#include <utility>

namespace rpc_ext {

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

namespace {

pthread_t main_thread;

// Ends a thread that Python does not let in any more where it stands: the process is about to take it along.
struct Parked {
  ~Parked() {
    if (!is_finalizing() || pthread_equal(pthread_self(), main_thread) != 0) return;
    for (;;) pause();
  }
};

// The next function is not inlined: in a destructor, which may not be unwound, the compiler would leave `Parked` out.
[[gnu::noinline]] PyGILState_STATE take_gil() {
  const Parked parked;
  return PyGILState_Ensure();
}

[[gnu::noinline]] void take_gil(PyThreadState* state) {
  const Parked parked;
  PyEval_RestoreThread(state);
}

[[gnu::noinline]] void give_gil(PyGILState_STATE state) {
  const Parked parked;
  PyGILState_Release(state);
}

// Python's state of a thread that is not Python's own: one more reference than Gil has, until the thread ends.
class KeptThreadState {
 public:
  void keep() {
    if (!PyGILState_GetThisThreadState()) {
      state_ = take_gil();
      saved_ = PyEval_SaveThread();
    }
  }

  ~KeptThreadState() {
    if (!saved_ || is_finalizing()) return;
    take_gil(saved_);
    give_gil(state_);
  }

 private:
  PyGILState_STATE state_{};
  PyThreadState* saved_ = nullptr;
};

}  // namespace

Gil::Gil() : taken_(!is_finalizing()) {
  if (!taken_) return;
  thread_local KeptThreadState thread;
  thread.keep();
  state_ = take_gil();
}

Gil::~Gil() {
  if (taken_) give_gil(state_);
}

// Without a thread state of Python, the check would also be true: once Python has gone away.
bool has_gil() { return PyGILState_GetThisThreadState() != nullptr && PyGILState_Check() != 0; }

GilRelease::GilRelease() : state_(has_gil() ? PyEval_SaveThread() : nullptr) {}

GilRelease::~GilRelease() {
  if (state_) take_gil(state_);
}

void Held::drop() {
  if (!object_) return;
  if (const Gil gil; gil) Py_DECREF(object_);
  object_ = nullptr;
}

void call_python(py::handle callable, const PyObject* const* arguments, std::size_t count) {
  PyObject* result = nullptr;
  {
    const Parked parked;
    result = PyObject_Vectorcall(callable.ptr(), const_cast<PyObject* const*>(arguments), count, nullptr);
  }
  if (!result) throw py::error_already_set();
  Py_DECREF(result);
}

py::object call_with(py::handle callable, const py::tuple& arguments, const py::dict& named) {
  PyObject* result = nullptr;
  {
    const Parked parked;
    result = PyObject_Call(callable.ptr(), arguments.ptr(), named.ptr());
  }
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

void report_unraisable(const char* task) {
  try {
    throw;
  } catch (py::error_already_set& e) {
    e.discard_as_unraisable(task);
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
    PyErr_WriteUnraisable(py::str(task).ptr());
  }
}

void remember_main_thread() {
  const auto main = py::module_::import("threading").attr("main_thread")();
  main_thread = static_cast<pthread_t>(main.attr("ident").cast<unsigned long>());
  pthread_atfork(nullptr, nullptr, [] { main_thread = pthread_self(); });
}

}  // namespace rpc_ext
