// The messages and problems of remote stores, for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "python.h"
#include "store/wire/message.h"

namespace rpc_ext::store {

py::tuple to_python(const Problem& problem);
Problem problem_from(const py::tuple& of);
py::tuple to_python(const StoreRequest& request);

void bind_messages(py::module_& m);

}  // namespace rpc_ext::store
