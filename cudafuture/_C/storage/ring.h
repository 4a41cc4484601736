// A backend on io_uring, through liburing where the build has found it.
//
// One ring for each engine, used by the engine's thread alone (SINGLE_ISSUER, DEFER_TASKRUN where the kernel has them).
// A ring that other threads submit to is no alternative: the kernel cancels what a thread has submitted when that
// thread ends.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "storage/backend.h"

namespace cudafuture::storage {

// A ring for so many blocks at a time, made by the thread that uses it; null, with the reason, where there is none.
// Its buffers are registered with the kernel where the limit of locked memory allows.
std::unique_ptr<Backend> make_ring(std::size_t depth, std::string& why_not);

}  // namespace cudafuture::storage
