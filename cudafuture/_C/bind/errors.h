// C++ errors to Python exceptions. Each kind of failure takes one channel; see ../README.md.
#pragma once

#include "bind/python.h"

namespace cudafuture::bind {

// The Python exception that stands for a C++ one: the object itself where C++ only carried a Python error.
nb::object exception_of(const std::exception_ptr& error);

// An exception object of cudafuture.errors.
nb::object make_error(const char* type, const std::string& message);
[[noreturn]] void raise(nb::handle exception);
[[noreturn]] void raise_error(const char* type, const std::string& message);

// The current Python error, normalised, with its traceback; the error indicator is cleared.
nb::object take_current_exception() noexcept;

// Logs what nobody is there to receive.
void log_error(const char* what, nb::handle subject, nb::handle exception) noexcept;

void install_translators();

}  // namespace cudafuture::bind
