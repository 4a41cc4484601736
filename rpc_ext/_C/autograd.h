#pragma once

namespace rpc_ext {

// Lets torch's distributed autograd take a new rank: otherwise it keeps the first rank of the process permanently.
// Called between sessions.
void forget_autograd_rank();

}  // namespace rpc_ext
