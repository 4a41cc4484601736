// The failure of functions that the library does not have: windows, device communicators and one-sided operations,
// which need device code of NCCL. The build generates a function for each, which calls this one.
#pragma once

// Returns ncclInvalidUsage, with a message that names the function.
extern "C" int fakenccl_unsupported(const char* function);
