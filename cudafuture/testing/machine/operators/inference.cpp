#include "machine/operators/inference.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <c10/util/Exception.h>

#include <exception>
#include <utility>
#include <vector>

#include "machine/operators/plain_state.h"
#include "machine/operators/python_calls.h"
#include "machine/operators/values.h"

namespace machine {
namespace {

at::Tensor meta_of(const at::Tensor& tensor) {
  // Meta kernels in Python get it as a number, which they ask for.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  at::Tensor meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  c10::TensorImpl* const impl = meta.unsafeGetTensorImpl();
  if (tensor.is_conj()) impl->_set_conj(true);
  if (tensor.is_neg()) impl->_set_neg(true);
  return meta;
}

c10::IValue meta_value(const c10::IValue& value, Kernels kernels) {
  if (value.isDevice()) return c10::Device(c10::DeviceType::Meta);
  if (value.isGenerator()) return {};
  return map_tensors(value, [&](const at::Tensor& tensor) {
    const bool is_read_now = kernels == Kernels::cuda && tensor.is_cpu();  // a mask of the host, for example
    return is_read_now ? tensor : meta_of(tensor);
  });
}

Results::New describe(const c10::IValue& value) {
  Results::New result;
  if (value.isTensor()) {
    result.layouts.emplace_back(value.toTensor());
  } else if (value.isTensorList()) {
    result.is_list = true;
    for (const at::Tensor& tensor : value.toTensorVector()) result.layouts.emplace_back(tensor);
  } else {
    result.layouts.emplace_back();
  }
  return result;
}

// Adds the written tensors that would get another size.
void compare(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, const Values& metas, Results& results) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!facts.arguments[i].written) continue;
    std::vector<at::Tensor> before;
    std::vector<at::Tensor> after;
    each_tensor(arguments[i], [&](const at::Tensor& tensor) { before.push_back(tensor); });
    each_tensor(metas[i], [&](const at::Tensor& tensor) { after.push_back(tensor); });
    for (std::size_t k = 0; k < before.size(); ++k) {
      if (before[k].sizes() != after[k].sizes()) results.resized.push_back({i, k, TensorLayout(after[k])});
    }
  }
}

// Corrects the meta kernels of batch normalization: they return statistics of the batch even outside of training.
void correct(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, Results& results) {
  if (facts.name != "aten::native_batch_norm" && facts.name != "aten::_native_batch_norm_legit") return;
  const auto training = facts.op.schema().argumentIndexWithName("training");
  if (!training.has_value() || arguments[static_cast<std::size_t>(*training)].toBool()) return;
  for (std::size_t i = 1; i < results.made.size(); ++i) {
    TensorLayout& statistics = results.made[i].layouts.front();
    statistics.sizes = {0};
    statistics.strides = {1};
  }
}

// The meta kernel of `x[indices] = values` looks at nothing, and a mistake there is a common one.
void check_values(const Facts& facts, const Values& metas) {
  if (facts.name != "aten::_index_put_impl_") return;
  Values stack{metas[0], metas[1]};
  facts_of("aten::index", "Tensor").op.callBoxed(&stack);
  const c10::IntArrayRef wanted = stack.front().toTensor().sizes();
  TORCH_CHECK(at::is_expandable_to(metas[2].toTensor().sizes(), wanted), "values do not fit into ", wanted);
}

// Is everything there that it writes?
bool all_sized(const Facts& facts, c10::ArrayRef<c10::IValue> arguments) {
  bool sized = !facts.has_new;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!facts.arguments[i].out) continue;
    each_tensor(arguments[i], [&](const at::Tensor& tensor) { sized &= tensor.numel() > 0; });
  }
  return sized;
}

// Null: the meta kernel failed.
std::shared_ptr<Results> run_meta(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, Kernels kernels) {
  Values metas;
  for (const c10::IValue& value : arguments) metas.push_back(meta_value(value, kernels));
  Values stack = metas;
  auto results = std::make_shared<Results>();
  try {
    run_apart([&] {
      if (kernels == Kernels::host) check_values(facts, metas);
      facts.op.callBoxed(&stack);
    });
  } catch (const c10::NotImplementedError&) {
    results->known = kernels == Kernels::host && all_sized(facts, arguments);
    return results;
  } catch (const std::exception& error) {
    if (is_interruption(error)) throw;
    // If the arguments are wrong, the host's kernel raises a better error.
    return nullptr;
  }
  for (std::size_t i = 0; i < stack.size(); ++i) {
    if (facts.returned[i] < 0) results->made.push_back(describe(stack[i]));
  }
  compare(facts, arguments, metas, *results);
  if (kernels == Kernels::host) correct(facts, arguments, *results);
  return results;
}

// A resize of something that was not empty warns each time, which the meta kernel does.
bool warns(const Results& results, c10::ArrayRef<c10::IValue> arguments) {
  bool any = false;
  for (const Results::Resized& resized : results.resized) {
    each_tensor(arguments[resized.argument], [&](const at::Tensor& tensor) { any |= tensor.numel() > 0; });
  }
  return any;
}

}  // namespace

std::shared_ptr<const Results> infer(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, Kernels kernels) {
  static const auto* const nothing = new std::shared_ptr<const Results>(std::make_shared<Results>());
  if (facts.shows_values || (facts.may_show_values && kernels == Kernels::host)) return nullptr;
  Signature signature;
  const bool can_remember = write_signature(facts, arguments, signature);
  std::shared_ptr<const Results> results = can_remember ? facts.known(signature) : nullptr;
  if (results == nullptr) {
    // A meta kernel may be Python.
    if (!may_call_python()) return all_sized(facts, arguments) ? *nothing : nullptr;
    results = run_meta(facts, arguments, kernels);
    if (results == nullptr) return nullptr;
    if (can_remember && !warns(*results, arguments)) facts.remember(std::move(signature), results);
  }
  return results->known ? results : nullptr;
}

}  // namespace machine
