// A part of a tensor, with a storage of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace rpc_ext {

// Returns a part of a tensor of bytes on the host as a tensor whose storage holds only the part: torch's RPC copies a
// tensor that is only a part of its storage. The result keeps the whole.
at::Tensor alone(const at::Tensor& data, std::int64_t at, std::int64_t length);

}  // namespace rpc_ext
