// Access to the C++ objects behind torch's own Python objects, through pybind11's conduit.
#pragma once

#include <pybind11/conduit/pybind11_conduit_v1.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bind/python.h"

namespace cudafuture::bind {

using TorchFuture = c10::ivalue::Future;
using TorchFuturePtr = c10::intrusive_ptr<TorchFuture>;
using torch::jit::PythonFutureWrapper;

// Returns the C++ object behind a pybind11 object of class T. The conduit is the interface that pybind11 guarantees,
// but it calls a method and takes microseconds. The first call checks whether the pointer is where torch's own pybind11
// headers place it. Later calls use the conduit only if it is not.
template <class T>
T* behind(nb::handle object) {
  enum { unknown, right, wrong };
  static int layout = unknown;
  const auto* instance = reinterpret_cast<pybind11::detail::instance*>(object.ptr());
  void* const at_hand = instance->simple_layout ? instance->simple_value_holder[0] : nullptr;
  if (layout == right && at_hand != nullptr) return static_cast<T*>(at_hand);
  T* const found = pybind11_conduit_v1::get_type_pointer_ephemeral<T>(object.ptr());
  if (found == nullptr) throw nb::python_error();
  if (layout == unknown) layout = found == at_hand ? right : wrong;
  return found;
}

}  // namespace cudafuture::bind
