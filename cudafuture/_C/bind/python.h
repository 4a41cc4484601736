// What every file of the binding includes: Python, nanobind, and how the two meet the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <optional>

#include "core/future.h"

namespace cudafuture::bind {

namespace nb = nanobind;

// Gives the GIL up for a scope. A thread that comes back while the interpreter is finalizing is parked for good: taking
// the GIL then would end the thread in the middle of C++ frames.
class WithoutGil {
 public:
  WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

void take_gil(PyThreadState* state) noexcept;

// Calls `callable`. Null, with the error set, when it raises. A thread that CPython ends inside this call is parked
// here, before anything of ours is unwound without the GIL. The first, for callbacks, takes one argument or none
// (null), and is called inside an Entry.
PyObject* call_python(PyObject* callable, PyObject* argument) noexcept;
PyObject* call_python(PyObject* callable, PyObject* const* arguments, std::size_t count) noexcept;

// Stands in every function of ours that runs Python, directly or not. A thread that CPython ends by unwinding it while
// the interpreter finalizes is parked there.
class Entry {
 public:
  Entry() noexcept;
  ~Entry();
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
};

// From now on that is done where a function may not be unwound at all, too. Only inside an Entry: other threads that
// end so are not ours, and an engine that joins its own would wait for ever. Called at exit.
void keep_threads_from_unwinding() noexcept;

bool is_finalizing() noexcept;
bool is_main_thread() noexcept;

// Tells the core how to get into the interpreter; called once, at import.
void install_runtime();

// An attribute of a Python module, looked up once and never dropped.
class Imported {
 public:
  constexpr Imported(const char* module, const char* name) : module_(module), name_(name) {}
  nb::handle get();
  nb::handle operator()() { return get(); }

 private:
  const char* module_;
  const char* name_;
  PyObject* object_ = nullptr;
};

// Seconds from Python. None and very long ones: no deadline. Negative and NaN: ValueError.
using Clock = Future::Clock;
using Deadline = std::optional<Clock::time_point>;
Deadline deadline_in(nb::handle timeout);

// The same for several arguments. Throws what it raises.
template <class... Arguments>
nb::object call(nb::handle callable, const Arguments&... arguments) {
  PyObject* const list[] = {nb::handle(arguments).ptr()...};
  nb::object result = nb::steal(call_python(callable.ptr(), list, sizeof...(arguments)));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

// In a handler for all exceptions: the unwinding of a thread that is not to go on looks like one, and ends here.
void park_if_unwinding() noexcept;

inline Foreign foreign(nb::object object) noexcept { return Foreign(object.release().ptr()); }

}  // namespace cudafuture::bind
