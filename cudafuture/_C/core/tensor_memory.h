// Checks that a tensor has memory for its elements, for functions that use memory by its address.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <initializer_list>
#include <optional>
#include <string>

namespace cudafuture {

// Returns the fault of a tensor whose storage is smaller than its elements: it was freed or shrunk. Tensors
// without a storage, or without data, have no such fault. A sparse tensor has that of its values and indices.
inline std::optional<std::string> storage_fault(const at::Tensor& tensor) {
  const auto first_fault = [](std::initializer_list<at::Tensor> parts) {
    std::optional<std::string> fault;
    for (const at::Tensor& part : parts) {
      if (!fault) fault = storage_fault(part);
    }
    return fault;
  };
  const c10::Layout layout = tensor.layout();
  if (layout == at::kSparse) return first_fault({tensor._values(), tensor._indices()});
  if (layout == at::kSparseCsr || layout == at::kSparseBsr) {
    return first_fault({tensor.values(), tensor.crow_indices(), tensor.col_indices()});
  }
  if (layout == at::kSparseCsc || layout == at::kSparseBsc) {
    return first_fault({tensor.values(), tensor.ccol_indices(), tensor.row_indices()});
  }
  if (tensor.layout() != at::kStrided || tensor.is_nested() || !tensor.has_storage()) return std::nullopt;
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.numel() == 0) return std::nullopt;
  if (tensor.storage().device_type() == c10::kMeta) return std::nullopt;
  const std::size_t wanted = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                              static_cast<std::size_t>(tensor.storage_offset()));
  const std::size_t held = tensor.storage().nbytes();
  if (held >= wanted) return std::nullopt;
  return "the storage of the tensor has " + std::to_string(held) + " bytes, but its elements need " +
         std::to_string(wanted) + ": it was freed or shrunk";
}

// Returns the reason why a tensor is not strided data in a memory of its own; none: it is.
inline std::optional<std::string> memory_fault(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  const auto without_memory = [](const std::string& kind, const char* remedy) {
    return kind + " has no memory of its own" + remedy;
  };
  if (tensor.is_nested()) return without_memory("a nested tensor", ": use its parts, from unbind()");
  if (keys.has(c10::DispatchKey::ZeroTensor)) return without_memory("an efficient zero tensor", ": clone() it first");
  if (keys.has(c10::DispatchKey::Functionalize)) return without_memory("a functional tensor", "");
  if (keys.has(c10::DispatchKey::FuncTorchBatched)) return without_memory("a tensor inside of vmap", "");
  if (tensor.layout() != at::kStrided) return without_memory("a tensor of layout " + c10::str(tensor.layout()), "");
  if (!tensor.has_storage() || tensor.storage().device_type() == c10::kMeta) {
    return without_memory("a tensor on " + tensor.device().str(), "");
  }
  if (auto fault = storage_fault(tensor)) return fault;
  const bool is_null = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
  return is_null && tensor.numel() != 0 ? std::optional(without_memory("a wrapper of other tensors", ": pass those"))
                                        : std::nullopt;
}

}  // namespace cudafuture
