// A backend on io_uring, through liburing if the build has found it.
//
// Each engine has one ring, which only the engine's thread uses (SINGLE_ISSUER and DEFER_TASKRUN, if the kernel has
// them). Other threads must not submit to it, because the kernel cancels a thread's requests when that thread ends.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "io/backend.h"

namespace cudafuture::io {

// Makes a ring for `depth` concurrent blocks, in the thread that uses it. Returns null, with the reason, if io_uring is
// not available. Its buffers are registered with the kernel if the limit of locked memory allows.
std::unique_ptr<Backend> make_ring(std::size_t depth, std::string& why_not);

}  // namespace cudafuture::io
