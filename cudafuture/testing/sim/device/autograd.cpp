#include "sim/device/autograd.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd.h>

#include <thread>

#include "sim/device/current.h"

namespace sim {
namespace {

at::ThreadLocalState state_of_new_thread() {
  at::ThreadLocalState* state = nullptr;
  std::thread([&] { state = new at::ThreadLocalState; }).join();
  return *state;
}

}  // namespace

// Each thread runs one backward pass after another, so a finished pass shows that the earlier ones are released. The
// pass here holds no Python object and computes nothing.
void settle_autograd() {
  const at::ThreadLocalStateGuard plain(state_of_new_thread());
  for (int i = 0; i < Accelerator::get().device_count(); ++i) {
    const at::Tensor nothing = at::empty({0}, torch_device(i));
    const at::Tensor leaf = at::empty({0}, torch_device(i)).requires_grad_();
    torch::autograd::backward({leaf.view({0, 1})}, {nothing.view({0, 1})});
  }
}

}  // namespace sim
