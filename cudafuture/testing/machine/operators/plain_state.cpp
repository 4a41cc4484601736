#include "machine/operators/plain_state.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <thread>

namespace machine {
namespace {

// Returns the state of a new thread, in which nothing has been set.
at::ThreadLocalState plain_state() {
  at::ThreadLocalState* state = nullptr;
  std::thread([&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::AutoGradMode no_grad(false);
    const at::DisableRecordFunctionGuard unobserved;
    state = new at::ThreadLocalState;
  }).join();
  return *state;
}

}  // namespace

void run_apart(const std::function<void()>& run) {
  static const auto* plain = new at::ThreadLocalState(plain_state());
  const at::ThreadLocalStateGuard guard(*plain);
  run();
}

}  // namespace machine
