// A tensor of the host's as it is now, for work that runs later.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

at::Tensor host_copy(const at::Tensor& tensor);

}  // namespace sim
