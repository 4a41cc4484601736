// Layout of a tensor, without its memory, and the predicted results of an operator.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace machine {

struct TensorLayout {
  TensorLayout() = default;  // of no tensor
  explicit TensorLayout(const at::Tensor& tensor);

  bool defined = false;
  at::ScalarType dtype = at::ScalarType::Undefined;
  c10::SmallVector<std::int64_t, 5> sizes;
  c10::SmallVector<std::int64_t, 5> strides;
};

struct Results {
  struct New {
    bool is_list = false;
    std::vector<TensorLayout> layouts;
  };
  struct Resized {
    std::size_t argument = 0;
    std::size_t position = 0;  // among the tensors of the argument
    TensorLayout layout;
  };

  bool known = true;  // false: only running it will tell
  std::vector<New> made;
  std::vector<Resized> resized;
};

}  // namespace machine
