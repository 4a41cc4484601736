// Calls from one loaded library to functions that the dynamic linker finds for it.
#pragma once

#include <cstddef>

namespace rpc_ext {

// Makes calls from a loaded library to `symbol`, its mangled name, go to `to`. Returns how many slots of the library's
// global offset table were changed: 0 where the library does not call it by way of the table, or is not loaded.
// `library` is a part of the library's file name. The change holds for the rest of the process; calls from other
// libraries are not changed. (System V ABI, 5 "Procedure Linkage Table".)
std::size_t redirect(const char* library, const char* symbol, const void* to);

}  // namespace rpc_ext
