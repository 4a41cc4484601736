// The client of remote offload, for Python.
#pragma once

#include "python.h"

namespace rpc_ext::offload::client {

void bind(py::module_& m);

}  // namespace rpc_ext::offload::client
