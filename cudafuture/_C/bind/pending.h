// Texts about pending futures, for cudafuture.debug and for the errors of waits.
#pragma once

#include <string>

#include "bind/python.h"
#include "core/thread_activity.h"

namespace cudafuture::bind {

// Returns the innermost line of the calling thread outside of the library and torch.
CodeLine calling_line();

// Returns the name and the line of a function, or of what a partial or a method calls. It reads what never changes, and
// needs no GIL; the object must stay alive.
std::string describe_function(void* object);

// Returns a sentence about what a pending future waits for: some of its leaves. Empty: it is one itself, and not known.
std::string pending_leaves(Future& future);

}  // namespace cudafuture::bind
