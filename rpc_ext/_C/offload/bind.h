#pragma once

#include "python.h"

namespace rpc_ext::offload {

void bind(py::module_& m);

}  // namespace rpc_ext::offload
