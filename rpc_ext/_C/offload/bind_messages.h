// The messages and problems of remote offload, for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "offload/wire.h"
#include "python.h"

namespace rpc_ext::offload {

py::tuple to_python(const Problem& problem);
py::tuple to_python(const OffloadRequest& request);

void bind_messages(py::module_& m);

}  // namespace rpc_ext::offload
