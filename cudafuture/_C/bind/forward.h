// Forwarding of an outcome from one future to another, and promises that cannot be kept.
#pragma once

#include "bind/python.h"

namespace cudafuture::bind {

// Creates a continuation that gives `child` the outcome of the future it is attached to.
Continuation* make_forward(nb::object child);

// Fails `child`, which would stay pending: the future that it depends on was dropped while pending, or the process is
// exiting.
void break_promise(const nb::object& child) noexcept;

}  // namespace cudafuture::bind
