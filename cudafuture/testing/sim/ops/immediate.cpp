#include "sim/ops/immediate.h"

#include <c10/util/Exception.h>

#include <utility>

#include "machine/operators/layout.h"
#include "machine/operators/plain_state.h"
#include "machine/operators/values.h"
#include "sim/device/current.h"
#include "sim/ops/copy.h"
#include "sim/ops/fallback.h"
#include "sim/ops/operator_task.h"
#include "sim/ops/tensors.h"

namespace sim {
namespace {

// A result of the kernel as a tensor of the device.
at::Tensor to_device(const Facts& facts, OperatorTask& task, const at::Tensor& result, int device) {
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::kStrided, facts.name, " makes a tensor of layout ",
                              result.layout(), ", which simulated devices do not have");
  const TensorLayout layout(result);
  at::Tensor made = new_tensor(device, layout.sizes, layout.strides, layout.dtype);
  // Memory of the device that the kernel returned as it was may be freed before it is copied.
  write_host_tensor(made, task.aliases().share_storage_with(result) ? result.clone() : result);
  return made;
}

// Gives the tensors that the kernel resized their new sizes on the device too.
void take_over_sizes(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, const OperatorTask& task) {
  std::size_t next = 0;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!facts.arguments[i].written) continue;
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_privateuseone()) return;
      const OperatorTask::Written& written = task.written()[next++];
      const at::Tensor& now = written.alias;
      const bool resized = tensor.sizes() != now.sizes() || tensor.strides() != now.strides();
      if (resized) resize_tensor(tensor, now.sizes(), now.strides());
      if (written.moved()) write_host_tensor(tensor, now);
    });
  }
}

}  // namespace

Values run_now(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, int device) {
  OperatorTask task(facts, arguments, device);
  if (!task.accesses().empty()) {
    // The kernel runs between this work and whatever the stream gets next.
    enqueue(device, facts.name.c_str(), [] {}, std::move(task.accesses()));
    Accelerator::get().synchronize(current_stream(device));
  }
  Values made;
  run_apart([&] { task.run(); });
  take_over_sizes(facts, arguments, task);
  for (std::size_t i = 0; i < task.results().size(); ++i) {
    if (facts.returned[i] >= 0) continue;
    made.push_back(map_tensors(task.results()[i],
                               [&](const at::Tensor& result) { return to_device(facts, task, result, device); }));
  }
  return made;
}

}  // namespace sim
