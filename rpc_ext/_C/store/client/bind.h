// The client of remote stores, for Python.
#pragma once

#include "python.h"

namespace rpc_ext::store::client {

void bind(py::module_& m);

}  // namespace rpc_ext::store::client
