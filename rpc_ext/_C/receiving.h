// The memory that tensors of other workers are received into.
#pragma once

#include <memory>
#include <vector>

#include "pieces.h"

namespace rpc_ext {

// Have all tensors that come from other workers, and fill most of a block, received into such blocks: in this process,
// by whoever uses torch's RPC. Once is enough.
void receive_into(std::vector<std::shared_ptr<Pieces>> pieces);

}  // namespace rpc_ext
