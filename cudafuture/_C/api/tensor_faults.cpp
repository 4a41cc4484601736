// Checks of tensors for other extension modules.
#include "api/tensors.h"
#include "core/tensor_memory.h"

namespace cudafuture::api {

std::optional<std::string> memory_fault(const at::Tensor& tensor) { return cudafuture::memory_fault(tensor); }
std::optional<std::string> storage_fault(const at::Tensor& tensor) { return cudafuture::storage_fault(tensor); }

}  // namespace cudafuture::api
