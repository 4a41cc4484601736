#include "ops/kernel.h"

#include <ATen/ThreadLocalState.h>

#include "ops/values.h"

namespace fakecuda {
namespace {

const at::ThreadLocalState& initial_state() {
  static const auto* const state = new at::ThreadLocalState;
  return *state;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

void remember_thread_state() { initial_state(); }

Kernel::Kernel(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) : op_(op) {
  const auto& formal = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = arguments[i];
    if (argument.isDevice()) {
      arguments_.push_back(c10::Device(at::kCPU));
    } else if (argument.isGenerator()) {
      arguments_.push_back(c10::IValue());  // the host's own
    } else {
      const bool writes = is_written(formal[i]);
      arguments_.push_back(map_tensors(argument, [&](const at::Tensor& t) { return to_placeholder(t, writes); }));
    }
  }
}

// A tensor of the host is copied, as CUDA copies the scalars that it passes to a kernel.
at::Tensor Kernel::to_placeholder(const at::Tensor& tensor, bool writes) {
  if (!tensor.is_cuda()) return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
  places_.emplace_back(tensor);
  accesses_.push_back(places_.back().access(writes));
  const auto index = static_cast<int64_t>(places_.size()) - 1;
  return at::empty({0}, tensor.options().device(at::kMeta)).as_strided({0}, {1}, index);
}

void Kernel::add_results(size_t index, const std::vector<at::Tensor>& results) {
  std::vector<Place> places;
  for (const at::Tensor& result : results) {
    places.emplace_back(result);
    accesses_.push_back(places.back().access(true));
  }
  results_.emplace_back(index, std::move(places));
}

std::vector<c10::IValue> Kernel::run() const {
  const at::ThreadLocalStateGuard state(initial_state());
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> views;
  for (const Place& place : places_) views.push_back(place.view());
  const auto to_view = [&](const at::Tensor& t) { return t.is_meta() ? views.at(t.storage_offset()) : t; };
  torch::jit::Stack stack;
  for (const c10::IValue& argument : arguments_) stack.push_back(map_tensors(argument, to_view));
  op_.callBoxed(&stack);
  for (const auto& [index, places] : results_) {
    size_t next = 0;
    each_tensor(stack.at(index), [&, &to = places](const at::Tensor& t) { to.at(next++).view().copy_(t); });
  }
  return stack;
}

}  // namespace fakecuda
