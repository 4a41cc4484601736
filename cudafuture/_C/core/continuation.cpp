#include "core/continuation.h"

#include "core/future.h"

namespace cudafuture {

// Here, where the future that `parent` points to is a complete type.
Continuation::Continuation(std::uint8_t flags, Executor* executor) noexcept : executor(executor), flags(flags) {}
Continuation::~Continuation() {
  if (place != 0) executor->leave(*this);
}

}  // namespace cudafuture
