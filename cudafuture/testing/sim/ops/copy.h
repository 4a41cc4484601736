// Copies: within a device, between devices, and between a device and the host.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

// As Tensor.copy_(), where at least one of the two is on a device. The host waits as it does with CUDA: not within a
// device or between devices; else unless `non_blocking`, and the memory is pinned and contiguous or (to a device)
// copied beforehand. A stream converts and rearranges as it copies.
void copy_tensor(const at::Tensor& target, const at::Tensor& source, bool non_blocking);

// Copies from a host tensor that is not written again. Does not wait.
void write_host_tensor(const at::Tensor& target, const at::Tensor& source);

}  // namespace sim
