// Threads of the library for functions that may block.
#pragma once

#include <functional>

#include "api/export.h"

namespace cudafuture::api {

// Calls a function on another thread, which may take the interpreter's lock.
CUDAFUTURE_API void call_elsewhere(std::function<void()> function);

}  // namespace cudafuture::api
