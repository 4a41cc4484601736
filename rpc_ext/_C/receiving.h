// The memory that tensors of other workers are received into.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace rpc_ext {

// Have tensors that come from other workers received into memory of this allocator, if they have `smallest` to
// `largest` bytes: in this process, by every user of torch's RPC. TensorPipe's thread allocates, which serves all
// connections: the allocator must not wait. It is never released. To be called once.
void receive_into(c10::Allocator& allocator, std::size_t smallest, std::size_t largest);

}  // namespace rpc_ext
