// The order in which a program and its callbacks issue collectives, for a module that issues them.
#pragma once

#include "api/export.h"

namespace cudafuture::api {

// True if this thread runs a callback whose order matters to collectives: the ranks may run it at different times.
CUDAFUTURE_API bool is_in_callback() noexcept;

// True if every callback that was attached in issue order before this point has run. Does not block.
CUDAFUTURE_API bool is_issue_turn();

}  // namespace cudafuture::api
