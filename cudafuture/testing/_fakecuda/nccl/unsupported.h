// The failure of functions that the library does not have.
#pragma once

namespace fakenccl {

// Return ncclInvalidUsage, with a message that names the function.
int unsupported(const char* function);

}  // namespace fakenccl
