#include "fakecuda/operators/redirect.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAException.h>

#include <exception>
#include <memory>
#include <optional>

#include "fakecuda/control/control.h"
#include "fakecuda/operators/kernel.h"
#include "machine/operators/inference.h"

namespace fakecuda {
namespace {

using c10::IValue;
using torch::jit::Stack;

void* current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

// The device of the arguments; torch's own kernels refuse several devices, and tensors of the host that are no scalars.
c10::Device device_of(const c10::OperatorHandle& op, const Values& arguments) {
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

// Gives arguments that the operator has resized their new sizes.
void resize_written(const Values& arguments, const Results& results) {
  for (const Results::Resized& resized : results.resized) {
    size_t position = 0;
    each_tensor(arguments[resized.argument], [&](const at::Tensor& tensor) {
      if (position++ == resized.position) tensor.resize_(resized.layout.sizes);
    });
  }
}

at::Tensor allocate(c10::Device device, const TensorLayout& layout) {
  if (!layout.defined) return {};
  return at::empty_strided(layout.sizes, layout.strides, at::TensorOptions().dtype(layout.dtype).device(device));
}

IValue allocate(c10::Device device, const Results::New& made) {
  if (!made.is_list) return allocate(device, made.layouts.front());
  c10::List<at::Tensor> list;
  for (const TensorLayout& layout : made.layouts) list.push_back(allocate(device, layout));
  return list;
}

// Returns the new tensors of the device that the kernel will write, one value for each return that is new.
Values allocate(c10::Device device, const Results& results, OperatorKernel& kernel) {
  Values made;
  for (const Results::New& result : results.made) kernel.write_new(made.emplace_back(allocate(device, result)));
  return made;
}

// Returns the returns of an operator: each is an argument, or is new.
Values returns_of(const Facts& facts, const Values& arguments, Values&& made) {
  Values returns;
  size_t next = 0;
  for (const int argument : facts.returned) {
    returns.push_back(argument < 0 ? std::move(made[next++]) : arguments[static_cast<size_t>(argument)]);
  }
  return returns;
}

// Runs the kernel and waits for it, since only its results say what they are.
Values run_and_wait(const OperatorKernel& kernel, c10::Device device) {
  Values results;
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

// Returns the returns of a kernel that ran: arguments, resized as it resized them, and new tensors of the device.
Values to_device(const Facts& facts, const Values& arguments, const Values& results, c10::Device device) {
  Values returns;
  for (size_t i = 0; i < results.size(); ++i) {
    const int argument = facts.returned[i];
    returns.push_back(argument < 0 ? map_tensors(
                                         results[i], [&](const at::Tensor& t) { return t.to(device); })
                                   : to_argument(arguments[static_cast<size_t>(argument)], results[i]));
  }
  return returns;
}

}  // namespace

// A launch fails where an earlier kernel has broken the device.
void redirect(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  C10_CUDA_CHECK(static_cast<cudaError_t>(fakecuda_device_error()));
  const size_t first = stack->size() - op.schema().arguments().size();
  const Values arguments(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  const Facts& facts = facts_of(op);
  const c10::Device device = device_of(op, arguments);
  const c10::DeviceGuard on_device(device);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  Values returns;
  if (const auto results = infer(facts, arguments, Kernels::cuda); results != nullptr) {
    resize_written(arguments, *results);
    auto kernel = std::make_shared<OperatorKernel>(facts, arguments);
    returns = returns_of(facts, arguments, allocate(device, *results, *kernel));
    fakecuda_launch(current_stream(device), kernel->name(), kernel->accesses(), [kernel] { kernel->run(); });
  } else {
    returns = to_device(facts, arguments, run_and_wait(OperatorKernel(facts, arguments), device), device);
  }
  stack->resize(first);
  for (IValue& value : returns) stack->push_back(std::move(value));
}

}  // namespace fakecuda
