// The bridges to torch's own handles: torch.futures.Future and c10d's Work.
#pragma once

#include "bind/python.h"

namespace cudafuture::bind {

// A future that follows `source`: a torch.futures.Future or a c10d Work.
nb::object from_torch(nb::handle source);

// `future` follows `work`, a c10d Work, and has `value` when it completes. The engine should be done with it within
// `timeout` seconds.
void follow_work(nb::handle work, FuturePtr future, nb::object value, double timeout);

// A torch.futures.Future that follows `future`, with torch's own way of carrying errors.
nb::object to_torch(nb::handle future);

// A C++ value of torch's as Python object.
nb::object object_of(const c10::IValue& value);

// The Python exception inside a pybind11 exception; null when it is none.
nb::object exception_of_pybind(const std::exception_ptr& error);

}  // namespace cudafuture::bind
