#include "core/continuation.h"

#include "core/future.h"

namespace cudafuture {

// Defined here, where Future, the type behind `parent`, is complete.
Continuation::Continuation(std::uint8_t flags, Executor* executor) noexcept : executor(executor), flags(flags) {}
Continuation::~Continuation() {
  if (place != 0) executor->leave(*this);
}

}  // namespace cudafuture
