#pragma once

namespace rpc_ext {

// torch's distributed autograd takes the rank that a process has first for its rank for ever. This lets it have another
// one in its next session. Called when no session is there.
void forget_autograd_rank();

}  // namespace rpc_ext
