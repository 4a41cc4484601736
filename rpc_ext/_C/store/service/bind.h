#pragma once

#include "python.h"

namespace rpc_ext::store {

void bind(py::module_& m);

}  // namespace rpc_ext::store
