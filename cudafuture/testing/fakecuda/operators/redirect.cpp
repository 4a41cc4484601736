#include "fakecuda/operators/redirect.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAException.h>

#include <exception>
#include <map>
#include <memory>
#include <optional>

#include "fakecuda/operators/kernel.h"
#include "fakecuda/operators/values.h"

extern "C" int fakecuda_device_error();

namespace fakecuda {
namespace {

using c10::IValue;
using torch::jit::Stack;

void* current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

// The device of the arguments; torch's own kernels refuse several devices, and tensors of the host that are no scalars.
c10::Device device_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::optional<c10::Device> device;
  for (const IValue& argument : arguments) {
    each_tensor(argument, [&](const at::Tensor& t) {
      if (!t.is_cuda()) {
        const bool takes_scalars = op.operator_name().name.rfind("aten::_foreach", 0) == 0;
        TORCH_CHECK(t.dim() == 0 || takes_scalars || argument.isOptionalTensorList(),
                    "Expected all tensors to be on the same device, but found a tensor of the host (",
                    op.operator_name(), ")");
        return;
      }
      TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but found ",
                  *device, " and ", t.device(), " (", op.operator_name(), ")");
      device = t.device();
    });
    if (argument.isDevice() && argument.toDevice().is_cuda() && !device) device = argument.toDevice();
  }
  TORCH_CHECK(device, "fakecuda: ", op.operator_name(), " has no device among its arguments");
  return *device;
}

// The results of an operator, inferred with torch's kernels for tensors without data ("meta").
class Inference {
 public:
  Inference(const c10::OperatorHandle& op, const std::vector<IValue>& arguments);

  // True if the results are known without the data.
  bool succeeded = false;
  // Gives arguments that the operator has resized their new sizes.
  void resize_arguments() const;
  // Returns the results on the device: arguments where they are arguments, new tensors otherwise.
  std::vector<IValue> allocate(c10::Device device, OperatorKernel& kernel) const;

 private:
  at::Tensor to_meta(const at::Tensor& tensor);

  Stack results_;
  std::map<c10::TensorImpl*, at::Tensor> metas_;      // by the argument
  std::map<c10::TensorImpl*, at::Tensor> arguments_;  // by the meta tensor
};

Inference::Inference(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  for (const IValue& argument : arguments) {
    if (argument.isDevice()) {
      results_.push_back(c10::Device(at::kMeta));
    } else if (argument.isGenerator()) {
      results_.push_back(IValue());
    } else {
      results_.push_back(map_tensors(argument, [&](const at::Tensor& t) { return to_meta(t); }));
    }
  }
  try {
    op.callBoxed(&results_);
    succeeded = true;
  } catch (const c10::NotImplementedError&) {
  } catch (const c10::Error&) {
    throw;                           // the arguments are wrong
  } catch (const std::exception&) {  // of a kernel in Python: the results depend on the data
  }
}

at::Tensor Inference::to_meta(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  at::Tensor& meta = metas_[tensor.unsafeGetTensorImpl()];
  if (meta.defined()) return meta;
  meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  arguments_[meta.unsafeGetTensorImpl()] = tensor;
  return meta;
}

void Inference::resize_arguments() const {
  for (const auto& [meta, argument] : arguments_) {
    if (argument.sizes() != meta->sizes()) argument.resize_(meta->sizes());
  }
}

std::vector<IValue> Inference::allocate(c10::Device device, OperatorKernel& kernel) const {
  std::vector<IValue> returns;
  for (size_t i = 0; i < results_.size(); ++i) {
    std::vector<at::Tensor> made;
    returns.push_back(map_tensors(results_[i], [&](const at::Tensor& meta) {
      if (!meta.is_meta()) return meta;
      const auto argument = arguments_.find(meta.unsafeGetTensorImpl());
      if (argument != arguments_.end()) return argument->second;
      return made.emplace_back(at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device)));
    }));
    if (!made.empty()) kernel.add_results(i, made);
  }
  return returns;
}

// Runs the kernel and waits for it, since only its results say what they are.
std::vector<IValue> run_and_wait(const OperatorKernel& kernel, c10::Device device) {
  std::vector<IValue> results;
  std::exception_ptr error;
  fakecuda_launch(current_stream(device), kernel.name(), kernel.accesses(), [&] {
    try {
      results = kernel.run();
    } catch (...) {
      error = std::current_exception();
    }
  });
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
  if (error != nullptr) std::rethrow_exception(error);
  return results;
}

// An argument that the kernel wrote; a kernel that resized it wrote memory of the host.
IValue to_argument(const IValue& argument, const IValue& result) {
  if (!argument.isTensor() || !result.isTensor() || argument.toTensor().sizes() == result.toTensor().sizes()) {
    return argument;
  }
  argument.toTensor().resize_(result.toTensor().sizes());
  argument.toTensor().copy_(result.toTensor());
  return argument;
}

// The results of a kernel that ran, on the device; where a result is an argument of the operator, that one.
std::vector<IValue> to_device(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
                              const std::vector<IValue>& results, c10::Device device) {
  const auto& formal = op.schema().arguments();
  std::vector<IValue> returns;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto* const alias = op.schema().returns()[i].alias_info();
    if (alias == nullptr) {
      returns.push_back(map_tensors(results[i], [&](const at::Tensor& t) { return t.to(device); }));
      continue;
    }
    for (size_t a = 0; a < arguments.size(); ++a) {
      if (const auto* const other = formal[a].alias_info(); other != nullptr && *other == *alias) {
        returns.push_back(to_argument(arguments[a], results[i]));
      }
    }
  }
  return returns;
}

}  // namespace

// A launch fails where an earlier kernel has broken the device.
void redirect(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  C10_CUDA_CHECK(static_cast<cudaError_t>(fakecuda_device_error()));
  const size_t first = stack->size() - op.schema().arguments().size();
  const std::vector<IValue> arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  const c10::Device device = device_of(op, arguments);
  const c10::DeviceGuard on_device(device);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Inference inference(op, arguments);
  std::vector<IValue> returns;
  if (inference.succeeded) {
    inference.resize_arguments();
    auto kernel = std::make_shared<OperatorKernel>(op, arguments);
    returns = inference.allocate(device, *kernel);
    fakecuda_launch(current_stream(device), kernel->name(), kernel->accesses(), [kernel] { kernel->run(); });
  } else {
    returns = to_device(op, arguments, run_and_wait(OperatorKernel(op, arguments), device), device);
  }
  stack->resize(first);
  for (IValue& value : returns) stack->push_back(std::move(value));
}

}  // namespace fakecuda
