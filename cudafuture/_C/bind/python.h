// Includes of every file of the binding: Python, nanobind, and the interface between them and the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <chrono>
#include <optional>

#include "core/future.h"

namespace cudafuture::bind {

namespace nb = nanobind;

// Releases the GIL for a scope. A thread that returns while the interpreter is finalizing is parked permanently: taking
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

// Calls `callable`. Returns null, with the error set, if it raises. A thread that CPython ends inside this call is
// parked here, before any of this library's frames are unwound without the GIL. The first overload, for callbacks,
// takes one argument or none (null), and is called inside a ParkingScope.
PyObject* call_python(PyObject* callable, PyObject* argument) noexcept;
PyObject* call_python(PyObject* callable, PyObject* const* arguments, std::size_t count) noexcept;

// Return a str, and the repr of an object, in UTF-8. Characters that UTF-8 cannot encode, such as a lone surrogate, are
// escaped. Throw the error of the __repr__.
std::string utf8_of(nanobind::handle text);
std::string repr_of(nanobind::handle object);

// A scope in every function of this library that runs Python, directly or indirectly. It parks a thread that CPython
// ends by unwinding while the interpreter finalizes.
class ParkingScope {
 public:
  ParkingScope() noexcept;
  ~ParkingScope();
  ParkingScope(const ParkingScope&) = delete;
  ParkingScope& operator=(const ParkingScope&) = delete;
};

// Extends the parking to functions that must not be unwound. It applies only inside a ParkingScope: other threads are
// not this library's, and an engine that joins its own parked thread would wait forever. Called at exit.
void keep_threads_from_unwinding() noexcept;

bool is_finalizing() noexcept;
bool is_main_thread() noexcept;

// Installs the foreign runtime in the core; called once, at import.
void install_runtime();

// An attribute of a Python module, looked up once and never released.
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

// Converts seconds from Python. None and very long times: no deadline. Negative and NaN: ValueError.
using Clock = Future::Clock;
using Deadline = std::optional<Clock::time_point>;
Deadline deadline_in(nb::handle timeout);

// Does the same for several arguments. Throws the exception that it raises.
template <class... Arguments>
nb::object call(nb::handle callable, const Arguments&... arguments) {
  PyObject* const list[] = {nb::handle(arguments).ptr()...};
  nb::object result = nb::steal(call_python(callable.ptr(), list, sizeof...(arguments)));
  if (!result.is_valid()) throw nb::python_error();
  return result;
}

// Called in handlers for all exceptions: the unwinding of a thread at finalization looks like an exception, and ends
// here.
void park_if_unwinding() noexcept;

inline Foreign foreign(nb::object object) noexcept { return Foreign(object.release().ptr()); }

}  // namespace cudafuture::bind
