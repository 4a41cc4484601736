#pragma once

#include <ATen/core/Tensor.h>

namespace fakecuda {

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking);

}  // namespace fakecuda
