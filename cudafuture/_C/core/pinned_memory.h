// Allocations of pinned memory beside stream captures.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <cstddef>
#include <optional>

#include "core/capture.h"

namespace cudafuture {

// A scope in which the calling thread allocates pinned memory without ending the captures of other threads: torch's
// allocator queries the events of freed blocks. Without a context on any device there are none, and the scope does
// nothing.
class PinnedMemoryScope {
 public:
  PinnedMemoryScope();

 private:
  std::optional<c10::DeviceGuard> guard_;
  std::optional<BesideCaptures> relaxed_;
};

// Sets relaxed capture mode in a thread of the library, once a device is in use: code that the program gives the
// library, such as a callback, may allocate pinned memory too. Does nothing in other threads.
void relax_library_thread();

// Returns so many bytes, uninitialized.
at::Tensor empty_pinned(std::size_t nbytes);

}  // namespace cudafuture
