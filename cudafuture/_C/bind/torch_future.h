// The bridges to torch.futures.Future.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>

#include "bind/python.h"

namespace cudafuture::bind {

bool is_torch_future(nb::handle object);

// Makes `future` follow torch's future; `producer` is kept alive until that is done.
void follow_torch_future(nb::handle torch_future, FuturePtr future, std::shared_ptr<Foreign> producer = {});

// Calls `callback` when torch's future is done. Pool streams of its devices are current then, and wait for its value.
void when_done(c10::ivalue::Future& source, std::function<void(c10::ivalue::Future&)> callback);

// Returns the events of torch's future, recorded on the current streams. Call it inside such a callback.
EventSet record_devices(const c10::ivalue::Future& source);

// Takes the events of torch's completed future, which has none afterwards, so no other code may use that future. None
// if it failed or its value holds no device memory. `capture`: the stream capture in which they were recorded; 0: none.
EventSet take_events(c10::ivalue::Future& source, std::uint64_t capture);

// Returns a torch.futures.Future that follows `future`; errors are carried in torch's own way.
nb::object to_torch(nb::handle future);

// Converts a C++ value of torch to a Python object.
nb::object object_of(const c10::IValue& value);

// Returns the Python exception inside a pybind11 exception; null if there is none.
nb::object exception_of_pybind(const std::exception_ptr& error);

}  // namespace cudafuture::bind
