#include "machine/operators/facts.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace machine {
namespace {

constexpr std::size_t kMostShapes = 4096;  // a program whose shapes never repeat must not fill the memory

// Operators that write arguments of which their schema does not say so.
struct HiddenWrite {
  std::string_view name;
  std::array<std::size_t, 2> arguments;
};
constexpr HiddenWrite kHiddenWrites[] = {
    {"aten::native_batch_norm", {3, 4}},  // the running statistics
    {"aten::batch_norm_update_stats", {1, 2}},
};

// Operators whose meta kernel predicts other shapes than those of the host's kernel, or too few.
constexpr std::string_view kMetaDiffers[] = {
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::_native_multi_head_attention",
    "aten::_transformer_encoder_layer_fwd",
};

// Operators that read host tensors when they are called, as their CUDA kernels do.
constexpr std::string_view kTakesHostTensors[] = {
    "aten::_ctc_loss",
    "aten::_ctc_loss_backward",
    "aten::_pack_padded_sequence",
    "aten::_pack_padded_sequence_backward",
};

template <std::size_t N>
bool contains(const std::string_view (&names)[N], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// The type inside `X?` and `X[]`.
c10::TypeKind innermost(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::OptionalType) {
    return innermost(type->expectRef<c10::OptionalType>().getElementType());
  }
  if (type->kind() == c10::TypeKind::ListType) return innermost(type->expectRef<c10::ListType>().getElementType());
  return type->kind();
}

bool shares_memory(const c10::Argument& a, const c10::Argument& b) {
  if (a.alias_info() == nullptr || b.alias_info() == nullptr) return false;
  const auto& others = b.alias_info()->beforeSets();
  return std::any_of(a.alias_info()->beforeSets().begin(), a.alias_info()->beforeSets().end(),
                     [&](const c10::Symbol& set) { return others.contains(set); });
}

}  // namespace

Facts::Facts(const c10::OperatorHandle& handle) : op(handle), key(handle.operator_name()), name(key.name) {
  bool reads_tensors = false;
  for (const c10::Argument& argument : op.schema().arguments()) {
    Argument& known = arguments.emplace_back();
    const c10::TypeKind kind = innermost(argument.type());
    known.is_tensor = kind == c10::TypeKind::TensorType;
    known.is_number = kind == c10::TypeKind::NumberType;
    known.written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    known.out = known.written && argument.kwarg_only();
    reads_tensors |= known.is_tensor && !known.out;
    if (kind == c10::TypeKind::GeneratorType) generator = static_cast<int>(arguments.size()) - 1;
  }
  numbers_matter = !reads_tensors;
  random = generator >= 0 || op.hasTag(at::Tag::nondeterministic_seeded);
  may_show_values = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  read_returns();
  read_name();
}

void Facts::read_returns() {
  const auto& formal = op.schema().arguments();
  for (const c10::Argument& result : op.schema().returns()) {
    if (innermost(result.type()) != c10::TypeKind::TensorType) shows_values = true;
    const auto same = std::find_if(formal.begin(), formal.end(),
                                   [&](const c10::Argument& argument) { return shares_memory(argument, result); });
    if (same == formal.end()) {
      returned.push_back(-1);
      has_new = true;
    } else {
      returned.push_back(static_cast<int>(same - formal.begin()));
      is_view |= !result.alias_info()->isWrite();
    }
  }
}

void Facts::read_name() {
  for (const HiddenWrite& hidden : kHiddenWrites) {
    if (hidden.name != name) continue;
    for (const std::size_t i : hidden.arguments) arguments.at(i).written = true;
  }
  shows_values |= contains(kMetaDiffers, name);
  takes_host_tensors = contains(kTakesHostTensors, name);
}

std::shared_ptr<const Results> Facts::known(const Signature& signature) const {
  const std::lock_guard lock(mutex_);
  const auto found = results_.find(signature);
  return found == results_.end() ? nullptr : found->second;
}

void Facts::remember(Signature&& signature, std::shared_ptr<const Results> results) const {
  const std::lock_guard lock(mutex_);
  if (results_.size() >= kMostShapes) results_.clear();
  results_.insert_or_assign(std::move(signature), std::move(results));
}

const Facts& facts_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, const Facts*> near;
  const void* const address = &op.schema();
  if (const auto found = near.find(address); found != near.end()) {
    // An operator that was unregistered may have left its address to another.
    if (found->second->key == op.operator_name()) return *found->second;
  }
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::unordered_map<c10::OperatorName, std::unique_ptr<Facts>>;
  const std::lock_guard lock(*mutex);
  std::unique_ptr<Facts>& facts = (*all)[op.operator_name()];
  if (facts == nullptr) facts = std::make_unique<Facts>(op);
  near[address] = facts.get();
  return *facts;
}

const Facts& facts_of(const char* name, const char* overload) {
  return facts_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

}  // namespace machine
