// Checks of tensors before torch's engine serializes them. The engine ends the process, here or at the receiver, over a
// tensor that it cannot carry.
#pragma once

#include <ATen/core/Tensor.h>

#include <stdexcept>
#include <vector>

namespace rpc_ext {

// In Python: cudafuture.errors.TensorError.
class TensorFault final : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Throws TensorFault if a tensor is not strided data in a memory of its own, or if its storage was freed or shrunk.
void expect_memory(const at::Tensor& tensor);
// Throws TensorFault for a tensor whose storage was freed or shrunk.
void expect_storage(const at::Tensor& tensor);

// Returns a strided tensor as the engine can carry it; throws TensorFault if it cannot.
//
// A receiver's engine ends its process over a tensor without elements that has an offset beyond its storage, as a part
// of an empty tensor has, or is quantized and has an empty storage. Such a tensor gets offset 0, or a storage of one
// element.
at::Tensor sendable(const at::Tensor& tensor);

// Replaces the tensors of a message by their `sendable` form. Sparse tensors (COO) are checked only.
void make_sendable(std::vector<at::Tensor>& tensors);

}  // namespace rpc_ext
