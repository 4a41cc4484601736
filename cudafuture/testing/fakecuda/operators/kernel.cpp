#include "fakecuda/operators/kernel.h"

#include <ATen/EmptyTensor.h>

#include "machine/operators/plain_state.h"

namespace fakecuda {

OperatorKernel::OperatorKernel(const Facts& facts, const Values& arguments) : facts_(facts) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& argument = arguments[i];
    if (argument.isDevice()) {
      arguments_.push_back(c10::Device(at::kCPU));
    } else if (argument.isGenerator()) {
      arguments_.push_back(c10::IValue());  // the host's own
    } else {
      const bool writes = facts.arguments[i].written;
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

void OperatorKernel::write_new(const c10::IValue& made) {
  std::vector<Place>& places = made_.emplace_back();
  each_tensor(made, [&](const at::Tensor& tensor) {
    places.emplace_back(tensor);
    accesses_.push_back(places.back().access(true));
  });
}

Values OperatorKernel::run() const {
  Values stack;
  run_apart([&] {
    std::vector<at::Tensor> views;
    for (const Place& place : places_) views.push_back(place.view());
    const auto to_view = [&](const at::Tensor& t) {
      return t.is_meta() ? views.at(index_of_.at(t.unsafeGetTensorImpl())) : t;
    };
    for (const c10::IValue& argument : arguments_) stack.push_back(map_tensors(argument, to_view));
    facts_.op.callBoxed(&stack);
    auto places = made_.begin();
    for (size_t i = 0; i < stack.size() && places != made_.end(); ++i) {
      if (facts_.returned[i] >= 0) continue;
      const std::vector<Place>& targets = *places++;
      size_t next = 0;
      each_tensor(stack[i], [&](const at::Tensor& t) {
        if (next >= targets.size()) return;  // the host makes a tensor more than CUDA
        const at::Tensor result = targets[next++].view();
        if (t.numel() != 0) result.copy_(t);  // the host's batch_norm returns no statistics in eval mode
      });
    }
  });
  return stack;
}

}  // namespace fakecuda
