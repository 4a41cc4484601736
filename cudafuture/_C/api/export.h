// The interface of the native module for other extension modules: the headers of this folder, and nothing else.
//
// They need no header of the core. A module that includes them is linked to cudafuture/_C, so both use the same core.
#pragma once

#define CUDAFUTURE_API __attribute__((visibility("default")))
