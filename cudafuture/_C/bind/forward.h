// From one future to another: outcomes that travel on, and promises that cannot be kept.
#pragma once

#include "bind/python.h"

namespace cudafuture::bind {

// A continuation that gives `child` the outcome of the future it is attached to.
Continuation* make_forward(nb::object child);

// Nobody will complete `child`: what it waits for died while pending, or the process is exiting. Whoever still holds it
// would wait for ever, so it fails.
void break_promise(const nb::object& child) noexcept;

}  // namespace cudafuture::bind
