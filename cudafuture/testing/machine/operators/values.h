// The tensors among the arguments of an operator, wherever they are: alone, in a list, in a list with holes.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace machine {

using Values = std::vector<c10::IValue>;

template <class F>
void each_tensor(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) f(tensor);
  } else if (value.isTensorList()) {
    const c10::List<at::Tensor> list = value.toTensorList();
    for (std::size_t i = 0; i < list.size(); ++i) {
      const at::Tensor tensor = list.get(i);
      if (tensor.defined()) f(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    const c10::List<std::optional<at::Tensor>> list = value.toOptionalTensorList();
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> tensor = list.get(i);
      if (tensor.has_value() && tensor->defined()) f(*tensor);
    }
  }
}

// The same value with each tensor in it replaced by what `f` makes of it.
template <class F>
c10::IValue map_tensors(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? c10::IValue(f(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    const c10::List<at::Tensor> list = value.toTensorList();
    mapped.reserve(list.size());
    for (std::size_t i = 0; i < list.size(); ++i) {
      at::Tensor tensor = list.get(i);
      mapped.push_back(tensor.defined() ? f(tensor) : std::move(tensor));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    const c10::List<std::optional<at::Tensor>> list = value.toOptionalTensorList();
    mapped.reserve(list.size());
    for (std::size_t i = 0; i < list.size(); ++i) {
      std::optional<at::Tensor> tensor = list.get(i);
      if (tensor.has_value() && tensor->defined()) tensor = f(*tensor);
      mapped.push_back(std::move(tensor));
    }
    return mapped;
  }
  return value;
}

}  // namespace machine
