// An operator's CUDA kernel, replaced: the call infers the results, allocates them on the device, and enqueues torch's
// kernel for the host on the current stream of the device.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace fakecuda {

void redirect(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace fakecuda
