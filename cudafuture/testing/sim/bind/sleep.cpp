#include "sim/bind/sleep.h"

#include <nanobind/nanobind.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <exception>

#include "machine/operators/python_calls.h"
#include "sim/runtime/accelerator.h"

namespace sim {
namespace {

namespace nb = nanobind;

pthread_t main_thread;

void* leave_python() { return PyGILState_Check() != 0 ? static_cast<void*>(PyEval_SaveThread()) : nullptr; }
void return_to_python(void* state) {
  if (state != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

bool is_finalizing() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Python handles signals in its main thread only: no other needs the GIL for it. Who called may have given the GIL up
// long before the sleep, as torch does, so this is not about what `leave_python` saved.
bool handles_signals() noexcept {
  return pthread_equal(pthread_self(), main_thread) != 0 && Py_IsInitialized() != 0 && !is_finalizing() &&
         PyGILState_GetThisThreadState() != nullptr;
}

// An exception of a handler travels as torch's own C++ exception, which its bindings turn into the same Python object.
void check_signals() {
  if (!handles_signals()) return;
  python_error raised;
  {
    const nb::gil_scoped_acquire gil;
    // An exception on its way through a destructor that waits must not meet another.
    if (PyErr_Occurred() != nullptr || PyErr_CheckSignals() == 0) return;
    raised.persist();
  }
  throw raised;
}

// KeyboardInterrupt, SystemExit and the like, out of code of Python that torch has called.
bool is_exit(const std::exception& error) noexcept {
  PyObject* type = nullptr;
  if (const auto* raised = dynamic_cast<const python_error*>(&error)) type = raised->type;
  if (const auto* raised = dynamic_cast<const pybind11::error_already_set*>(&error)) type = raised->type().ptr();
  if (type == nullptr) return false;
  const nb::gil_scoped_acquire gil;
  return PyErr_GivenExceptionMatches(type, PyExc_Exception) == 0;
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    raised.restore();
  }
}

}  // namespace

void install_sleep() {
  const nb::object ident = nb::module_::import_("threading").attr("main_thread")().attr("ident");
  main_thread = static_cast<pthread_t>(nb::cast<unsigned long>(ident));
  nb::register_exception_translator(&translate);
  set_is_interruption(&is_exit);
  Accelerator::get().set_sleep_hooks(&leave_python, &return_to_python, &check_signals);
}

}  // namespace sim
