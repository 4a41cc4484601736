#include "sim/ops/operator_task.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <cstddef>

#include "machine/operators/values.h"
#include "sim/device/generator.h"
#include "sim/ops/host_tensor.h"
#include "sim/ops/host_watch.h"
#include "sim/ops/randomness.h"
#include "sim/runtime/accelerator.h"

namespace sim {
namespace {

// A kernel and its meta kernel may differ in outputs that do not matter: one of them makes an empty tensor or none.
void fill(const Facts& facts, const at::Tensor& made, const at::Tensor& from) {
  if (!made.defined() || !from.defined()) return;
  if (made.numel() == 0 || from.numel() == 0) return;
  TORCH_CHECK(from.layout() == c10::kStrided, facts.name, " makes a tensor of layout ", from.layout(),
              ", which a simulated device cannot hold");
  TORCH_CHECK(made.numel() == from.numel(), facts.name, " made a tensor of size ", from.sizes(), " where one of size ",
              made.sizes(), " was predicted");
  made.copy_(from.sizes() == made.sizes() ? from : from.reshape(made.sizes()));
}

void fill_value(const Facts& facts, const c10::IValue& made, const c10::IValue& from) {
  if (made.isTensor() && from.isTensor()) {
    fill(facts, made.toTensor(), from.toTensor());
  } else if (made.isTensorList() && from.isTensorList()) {
    const c10::List<at::Tensor> targets = made.toTensorList();
    const c10::List<at::Tensor> sources = from.toTensorList();
    TORCH_CHECK(targets.size() == sources.size(), facts.name, " made ", sources.size(), " tensors where ",
                targets.size(), " were predicted");
    for (std::size_t i = 0; i < targets.size(); ++i) fill(facts, targets.get(i), sources.get(i));
  }
}

}  // namespace

OperatorTask::OperatorTask(const Facts& op, c10::ArrayRef<c10::IValue> arguments, int device) : facts_(op) {
  stack_.reserve(arguments.size());
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    stack_.push_back(prepared(arguments[i], op.arguments[i].written));
  }
  if (op.generator >= 0) {
    c10::IValue& generator = stack_[static_cast<std::size_t>(op.generator)];
    generator = host_generator(generator, device);
  } else if (op.random) {
    host_seed_ = draw_seed(default_generator(device));
  }
}

c10::IValue OperatorTask::prepared(const c10::IValue& value, bool writes) {
  if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
  return map_tensors(value, [&](const at::Tensor& tensor) {
    if (!tensor.is_privateuseone()) {
      note_host_read(tensor, facts_.name.c_str());
      return host_copy(tensor);
    }
    accesses_.add(tensor, writes);
    at::Tensor alias = aliases_.of(tensor);
    if (writes) written_.push_back({alias, Accelerator::alias(tensor.storage().data()), alias.numel()});
    return alias;
  });
}

void OperatorTask::write_new(const c10::IValue& made) {
  made_.push_back(map_tensors(made, [&](const at::Tensor& tensor) {
    accesses_.write(tensor);
    return aliases_.of(tensor);
  }));
}

void OperatorTask::move_back() {
  for (const Written& written : written_) {
    const at::Tensor& alias = written.alias;
    TORCH_CHECK(alias.numel() == written.numel, facts_.name, " resized a tensor to ", alias.sizes(),
                ", which was not predicted");
    if (!written.moved() || alias.numel() == 0) continue;
    auto* const data = static_cast<std::byte*>(written.data) + alias.storage_offset() * alias.itemsize();
    at::from_blob(data, alias.sizes(), alias.strides(), alias.options()).copy_(alias);
  }
}

void OperatorTask::run() {
  {
    std::optional<SeededHost> seeded;
    if (host_seed_.has_value()) seeded.emplace(*host_seed_);
    facts_.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }
  if (made_.empty()) return;
  std::size_t next = 0;
  for (std::size_t i = 0; i < stack_.size() && next < made_.size(); ++i) {
    if (facts_.returned[i] < 0) fill_value(facts_, made_[next++], stack_[i]);
  }
}

}  // namespace sim
