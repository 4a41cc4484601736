#include "fakecuda/operators/kernel.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ThreadLocalState.h>

#include "fakecuda/operators/values.h"

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

OperatorKernel::OperatorKernel(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) : op_(op) {
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
//
// No tensor of a kernel may belong to a Python object. The thread that destroys the kernel would need the GIL for it,
// and the thread that holds the GIL may be waiting for the kernel. So placeholders are not made by an operator: some
// operators on meta tensors are written in Python.
at::Tensor OperatorKernel::to_placeholder(const at::Tensor& tensor, bool writes) {
  if (!tensor.is_cuda()) {
    at::Tensor copy = tensor.clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    return copy;
  }
  at::Tensor placeholder = at::detail::empty_meta({0}, at::kByte);
  index_of_[placeholder.unsafeGetTensorImpl()] = places_.size();
  places_.emplace_back(tensor);
  accesses_.push_back(places_.back().access(writes));
  return placeholder;
}

void OperatorKernel::add_results(size_t index, const std::vector<at::Tensor>& results) {
  std::vector<Place> places;
  for (const at::Tensor& result : results) {
    places.emplace_back(result);
    accesses_.push_back(places.back().access(true));
  }
  results_.emplace_back(index, std::move(places));
}

std::vector<c10::IValue> OperatorKernel::run() const {
  const at::ThreadLocalStateGuard state(initial_state());
  // Nor do the modes of Python apply, such as torch's sanitizer, which TORCH_CUDA_SANITIZER enables before this library
  // is loaded: it has seen the operator, and is not made for several threads.
  const c10::impl::ExcludeDispatchKeyGuard no_python(c10::python_ks);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> views;
  for (const Place& place : places_) views.push_back(place.view());
  const auto to_view = [&](const at::Tensor& t) {
    return t.is_meta() ? views.at(index_of_.at(t.unsafeGetTensorImpl())) : t;
  };
  torch::jit::Stack stack;
  for (const c10::IValue& argument : arguments_) stack.push_back(map_tensors(argument, to_view));
  op_.callBoxed(&stack);
  for (const auto& [index, places] : results_) {
    size_t next = 0;
    each_tensor(stack.at(index), [&, &to = places](const at::Tensor& t) {
      const at::Tensor result = to.at(next++).view();
      if (t.numel() != 0) result.copy_(t);  // the host's batch_norm returns no statistics in eval mode
    });
  }
  return stack;
}

}  // namespace fakecuda
