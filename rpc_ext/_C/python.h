#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <utility>

namespace rpc_ext {

namespace py = pybind11;

// Python is going away, and admits no more threads.
bool is_finalizing();

// Takes the GIL. An agent's thread keeps its Python thread state until it ends, rather than making a new one each time.
// False while Python shuts down and admits no more threads.
class Gil {
 public:
  Gil();
  ~Gil();
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;
  explicit operator bool() const { return taken_; }

 private:
  const bool taken_;
  PyGILState_STATE state_{};
};

// Releases the GIL, if this thread has it.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* const state_;
};

// A Python object that C++ threads hold without the GIL. Leaked where Python is going away.
class Held {
 public:
  explicit Held(py::object object) : object_(object.release().ptr()) {}
  Held(Held&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  ~Held() { drop(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  py::handle get() const { return object_; }
  py::object take() { return py::reinterpret_steal<py::object>(std::exchange(object_, nullptr)); }  // with the GIL
  void drop();

 private:
  PyObject* object_;
};

// Calls Python, from a thread of the agent's, with the GIL; throws py::error_already_set. A thread that may not come
// back, since Python goes away meanwhile, stays inside: before 3.14 Python would unwind its stack, and torch ends the
// process over that.
void call_python(py::handle callable, const PyObject* const* arguments, std::size_t count);

template <class... Arguments>
void call_python(py::handle callable, const Arguments&... arguments) {
  const PyObject* const given[] = {arguments.ptr()..., nullptr};
  call_python(callable, given, sizeof...(arguments));
}

// The same, with the result.
py::object call_with(py::handle callable, const py::tuple& arguments, const py::dict& named = {});

template <class... Arguments>
py::object call(py::handle callable, Arguments&&... arguments) {
  return call_with(callable, py::make_tuple(std::forward<Arguments>(arguments)...));
}

bool has_gil();  // this thread

// Reports the exception that is handled, as unraisable in `task`. Called with the GIL.
void report_unraisable(const char* task);

// Calls `function` with the GIL, on any thread; does nothing while Python is going away. Its errors are thrown to a
// caller that had the GIL already. Others are reported as unraisable in `task`: no error of Python leaves the GIL.
template <class Function>
void run_with_gil(const char* task, const Function& function) {
  const bool had_gil = has_gil();
  const Gil gil;
  if (!gil) return;
  try {
    function();
  } catch (const std::exception&) {
    if (had_gil) throw;
    report_unraisable(task);
  }
}

// Remembers which thread is Python's main one, the last to use Python.
void remember_main_thread();

}  // namespace rpc_ext
