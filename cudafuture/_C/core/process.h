// The state of the process that matters to threads and locks: forked since the first use, or shutting down.
#pragma once

namespace cudafuture {

// Called by every function that would break in a forked child. The first call installs the fork handler.
void mark_used() noexcept;

// True in a child forked from a process that had used the library: its threads do not exist, and its locks may be held
// permanently.
bool is_forked_child() noexcept;

// Throws Error(invalid_state) in such a child.
void refuse_after_fork();

// Sets the one function that shutdown calls first. It tells the tasks on threads of the core to finish.
void at_shut_down(void (*begin)() noexcept) noexcept;

// Stops and joins the library's threads. From then on no callback runs; later posts are leaked on purpose. The caller
// must be outside the interpreter, which the threads may need to finish. Calls `go_on` from time to time while
// callbacks run; when it returns false, their threads are left running.
void shut_down(bool (*go_on)() noexcept = nullptr) noexcept;
bool is_shut_down() noexcept;

}  // namespace cudafuture
