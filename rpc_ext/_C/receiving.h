// The memory that tensors of other workers are received into.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace rpc_ext {

// Receive tensors of other workers into memory of this allocator, if they have `smallest` to `largest` bytes; nullptr:
// into memory that torch allocates. This holds for every user of torch's RPC in this process, until the next call.
// TensorPipe's thread, which serves all connections, allocates: the allocator must not wait. It is never released.
void receive_into(c10::Allocator* allocator, std::size_t smallest, std::size_t largest);

}  // namespace rpc_ext
