// Calls of code in Python from below it: a meta kernel may be written in Python. The module above sets the functions.
#pragma once

#include <exception>

namespace machine {

// Returns true if this thread may run code in Python. A thread that Python does not know may not: it could wait for the
// lock of a thread that waits for it. True where no function is set.
bool may_call_python() noexcept;
void set_may_call_python(bool (*may)() noexcept) noexcept;

// Returns true if Python has interrupted the operation, as Ctrl-C does. Then no fallback may be tried.
bool is_interruption(const std::exception& error) noexcept;
void set_is_interruption(bool (*is)(const std::exception& error) noexcept) noexcept;

}  // namespace machine
