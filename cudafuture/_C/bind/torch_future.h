// The bridges to torch's own handles: torch.futures.Future and c10d's Work.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>

#include "bind/python.h"

namespace cudafuture::bind {

// A future that follows `source`: a torch.futures.Future or a c10d Work.
nb::object from_torch(nb::handle source);

bool is_torch_future(nb::handle object);

// `future` follows torch's; `producer` is kept alive until that is done.
void follow_torch_future(nb::handle torch_future, FuturePtr future, std::shared_ptr<Foreign> producer = {});

// The events of torch's future, recorded on the current streams. Call it inside a callback of that future.
EventSet record_devices(const c10::ivalue::Future& source);

// A torch.futures.Future that follows `future`, with torch's own way of carrying errors.
nb::object to_torch(nb::handle future);

// A C++ value of torch's as Python object.
nb::object object_of(const c10::IValue& value);

// The Python exception inside a pybind11 exception; null when it is none.
nb::object exception_of_pybind(const std::exception_ptr& error);

}  // namespace cudafuture::bind
