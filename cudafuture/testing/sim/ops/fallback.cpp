#include "sim/ops/fallback.h"

#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <utility>

#include "machine/operators/inference.h"
#include "machine/operators/values.h"
#include "sim/device/current.h"
#include "sim/device/here.h"
#include "sim/ops/immediate.h"
#include "sim/ops/operator_task.h"
#include "sim/ops/tensors.h"

namespace sim {
namespace {

[[noreturn]] void refuse_devices(const Facts& facts, c10::Device one, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
              other, "! (when calling ", facts.name, ")");
}

// The device that all tensors are on. The host's own may be among them where a CUDA kernel takes them too: numbers, and
// indices.
int device_of(const Facts& facts, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  std::optional<c10::Device> other;
  for (const c10::IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_privateuseone() && !device.has_value()) {
      device = torch_device(device_index(value.toDevice()));
    }
    const bool may_be_host = facts.takes_host_tensors || value.isOptionalTensorList();
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.is_privateuseone()) {
        if (!device.has_value()) device = tensor.device();
        if (tensor.device() != *device) refuse_devices(facts, *device, tensor.device());
      } else if (!tensor.is_cpu() || (tensor.dim() > 0 && !may_be_host)) {
        other = tensor.device();
      }
    });
  }
  const int index = device_index(device);
  if (other.has_value()) refuse_devices(facts, torch_device(index), *other);
  return index;
}

void expect_possible(const Facts& facts) {
  TORCH_CHECK_NOT_IMPLEMENTED(facts.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "a simulated device computes with the kernels of the host, and there is none for ",
                              facts.op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(!facts.is_view, facts.op.operator_name(), " makes a view, and simulated devices do not ",
                              "know it");
}

void resize_written(c10::ArrayRef<c10::IValue> arguments, const Results& results) {
  for (const Results::Resized& resized : results.resized) {
    std::size_t position = 0;
    each_tensor(arguments[resized.argument], [&](const at::Tensor& tensor) {
      if (position++ == resized.position) resize_tensor(tensor, resized.layout.sizes, resized.layout.strides);
    });
  }
}

at::Tensor allocate(int device, const TensorLayout& layout) {
  return layout.defined ? new_tensor(device, layout.sizes, layout.strides, layout.dtype) : at::Tensor();
}

c10::IValue allocate(int device, const Results::New& made) {
  if (!made.is_list) return allocate(device, made.layouts.front());
  c10::List<at::Tensor> list;
  for (const TensorLayout& layout : made.layouts) list.push_back(allocate(device, layout));
  return list;
}

// The returns of `facts`, out of its arguments and what is new, in place of the arguments.
void put_returns(const Facts& facts, Values&& made, Values* stack) {
  const std::size_t first = stack->size() - facts.arguments.size();
  Values returns;
  returns.reserve(facts.returned.size());
  std::size_t next = 0;
  for (const int argument : facts.returned) {
    returns.push_back(argument < 0 ? std::move(made[next++]) : (*stack)[first + static_cast<std::size_t>(argument)]);
  }
  stack->resize(first);
  for (c10::IValue& value : returns) stack->push_back(std::move(value));
}

}  // namespace

void enqueue(int device, const char* name, std::function<void()> run, AccessList&& accesses, WorkKind kind) {
  Work work;
  work.run = std::move(run);
  work.cost = {kind, accesses.bytes(), 0};
  work.accesses = std::move(accesses).take();
  work.site = here(name);
  Accelerator::get().submit(current_stream(device), std::move(work));
}

void run_on_device(const Facts& facts, Values* stack) {
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + stack->size() - facts.arguments.size(),
                                             facts.arguments.size());
  const int device = device_of(facts, arguments);
  expect_possible(facts);
  const DeviceScope scope(device);
  const std::shared_ptr<const Results> results = infer(facts, arguments, Kernels::host);
  if (results == nullptr) return put_returns(facts, run_now(facts, arguments, device), stack);

  resize_written(arguments, *results);
  auto task = std::make_shared<OperatorTask>(facts, arguments, device);
  Values made;
  made.reserve(results->made.size());
  for (const Results::New& result : results->made) {
    made.push_back(allocate(device, result));
    task->write_new(made.back());
  }
  AccessList accesses = std::move(task->accesses());
  enqueue(
      device, facts.name.c_str(),
      [task = std::move(task)] {
        task->run();
        task->move_back();
      },
      std::move(accesses));
  put_returns(facts, std::move(made), stack);
}

void fall_back(const c10::OperatorHandle& op, c10::DispatchKeySet, Values* stack) {
  run_on_device(facts_of(op), stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

// torch.autocast changes nothing: which operators it would cast is each device's own affair.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// torch would take these apart, into more work than the host's kernels, and with other rounding.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fall_back>());
  }
}

}  // namespace sim
