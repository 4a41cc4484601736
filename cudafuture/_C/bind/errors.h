// Conversion of C++ errors to Python exceptions. Each kind of failure uses one channel; see ../README.md.
#pragma once

#include <string_view>

#include "bind/python.h"

namespace cudafuture::bind {

// Returns the Python exception for a C++ one: the original object if C++ only carried a Python error.
nb::object exception_of(const std::exception_ptr& error);

// Create an exception object: of a class, or of the class of cudafuture.errors with that name.
nb::object make_error(PyObject* type, std::string_view message);
nb::object make_error(const char* type, std::string_view message);
[[noreturn]] void raise(nb::handle exception);
[[noreturn]] void raise_error(const char* type, const std::string& message);

// Returns the current Python error, normalised, with its traceback; clears the error indicator.
nb::object take_current_exception() noexcept;

// Logs an error that no caller can receive.
void log_error(const char* what, nb::handle subject, nb::handle exception) noexcept;

void install_translators();

}  // namespace cudafuture::bind
