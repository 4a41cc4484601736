#include "bind/errors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include "bind/torch_future.h"
#include "bind/work_errors.h"
#include "core/error.h"
#include "io/failure.h"

namespace cudafuture::bind {
namespace {

const char* class_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_state:
      return "InvalidStateError";
    case ErrorKind::device_mismatch:
      return "DeviceMismatchError";
    case ErrorKind::cancelled:
      return "CancelledError";
    case ErrorKind::no_thread:
      return "CUDAFutureError";
  }
  return "CUDAFutureError";
}

template <class T>
bool is(const c10::Error& error) {
  return dynamic_cast<const T*>(&error) != nullptr;
}

// Maps to the classes that torch's own binding raises. torch does not export its own classes, so they are found by
// name.
nb::object of_c10(const c10::Error& error) {
  const auto torch_class = [](const char* name) { return nb::object(nb::module_::import_("torch._C").attr(name)); };
  nb::object type = nb::borrow(nb::handle(PyExc_RuntimeError));
  if (is<c10::IndexError>(error)) type = nb::borrow(nb::handle(PyExc_IndexError));
  if (is<c10::ValueError>(error)) type = nb::borrow(nb::handle(PyExc_ValueError));
  if (is<c10::TypeError>(error)) type = nb::borrow(nb::handle(PyExc_TypeError));
  if (is<c10::NotImplementedError>(error)) type = nb::borrow(nb::handle(PyExc_NotImplementedError));
  if (is<c10::LinAlgError>(error)) type = torch_class("_LinAlgError");
  if (is<c10::OutOfMemoryError>(error)) type = torch_class("OutOfMemoryError");
  if (is<c10::DistError>(error)) type = torch_class("_DistError");
  if (is<c10::DistBackendError>(error)) type = torch_class("_DistBackendError");
  if (is<c10::DistNetworkError>(error)) type = torch_class("_DistNetworkError");
  if (is<c10::DistStoreError>(error)) type = torch_class("_DistStoreError");
  return make_error(type.ptr(), error.what_without_backtrace());
}

const char* class_of(io::FailureKind kind) {
  switch (kind) {
    case io::FailureKind::storage:
      return "StorageError";
    case io::FailureKind::checksum:
      return "ChecksumError";
    case io::FailureKind::quota:
      return "QuotaError";
    case io::FailureKind::not_found:
      return "NotFoundError";
  }
  return "StorageError";
}

nb::object of_storage(const io::Failure& failure) {
  nb::object error = make_error(class_of(failure.kind()), failure.what());
  if (failure.kind() == io::FailureKind::not_found) return error;
  if (failure.code() != 0) error.attr("errno") = failure.code();
  error.attr("path") = make_error(reinterpret_cast<PyObject*>(&PyUnicode_Type), failure.path());
  error.attr("offset") = failure.offset();
  error.attr("wanted") = failure.wanted();
  error.attr("got") = failure.got();
  return error;
}

}  // namespace

// An engine's text may not be UTF-8.
nb::object make_error(PyObject* type, std::string_view message) {
  const auto size = static_cast<Py_ssize_t>(message.size());
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(message.data(), size, "backslashreplace"));
  if (!text.is_valid()) throw nb::python_error();
  return call(type, text);
}

nb::object make_error(const char* type, std::string_view message) {
  return make_error(nb::module_::import_("cudafuture.errors").attr(type).ptr(), message);
}

void raise(nb::handle exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw nb::python_error();
}

void raise_error(const char* type, const std::string& message) { raise(make_error(type, message)); }

nb::object exception_of(const std::exception_ptr& error) {
  if (error == nullptr) park_if_unwinding();
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return make_error(class_of(e.kind()), e.what());
  } catch (const io::Failure& e) {
    return of_storage(e);
  } catch (const WorkError& e) {
    return e.as_exception();
  } catch (nb::python_error& e) {
    return nb::borrow(e.value());
  } catch (const nb::builtin_exception& e) {
    const bool is_type = e.type() == nb::exception_type::type_error;
    const bool is_value = e.type() == nb::exception_type::value_error;
    return make_error(is_type ? PyExc_TypeError : is_value ? PyExc_ValueError : PyExc_RuntimeError, e.what());
  } catch (const python_error& e) {  // torch's own class
    if (e.value != nullptr) return nb::borrow(e.value);
    return make_error(PyExc_RuntimeError, e.what());
  } catch (const c10::Error& e) {
    return of_c10(e);
  } catch (...) {
    if (nb::object exception = exception_of_pybind(std::current_exception())) return exception;
    try {
      throw;
    } catch (const std::exception& e) {
      return make_error(PyExc_RuntimeError, e.what());
    } catch (...) {
      return make_error(PyExc_RuntimeError, "a C++ exception of an unknown type");
    }
  }
}

nb::object take_current_exception() noexcept {
#if PY_VERSION_HEX >= 0x030c0000
  return nb::steal(PyErr_GetRaisedException());
#else
  PyObject* type;
  PyObject* value;
  PyObject* traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return nb::steal(value);
#endif
}

void log_error(const char* what, nb::handle subject, nb::handle exception) noexcept {
  if (is_finalizing()) return;
  static Imported log{"cudafuture._log", "error"};
  try {
    call(log(), nb::str(what), subject, exception);
  } catch (nb::python_error& e) {
    e.discard_as_unraisable(what);
  } catch (...) {
    park_if_unwinding();
  }
}

void install_translators() {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& e) {
      const nb::object exception = make_error(class_of(e.kind()), e.what());
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
    } catch (const io::Failure& e) {
      const nb::object exception = of_storage(e);
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
    } catch (const c10::Error&) {
      const nb::object exception = exception_of(p);
      PyErr_SetObject(exception.type().ptr(), exception.ptr());
    }
  });
}

}  // namespace cudafuture::bind
