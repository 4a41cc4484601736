// The life of the process, as far as threads and locks care: forked since the first use, or going away.
#pragma once

namespace cudafuture {

// Called by everything that would be broken in a forked child. The first call installs the fork handler.
void mark_used() noexcept;

// True in a child forked from a process that had used the library: its threads are gone, its locks may be held for
// ever.
bool is_forked_child() noexcept;

// Throws Error(invalid_state) in such a child.
void refuse_after_fork();

// Has `begin` called first of all when the process goes away: it tells what runs on threads of the core to come to its
// end. There is one such function.
void at_shut_down(void (*begin)() noexcept) noexcept;

// Stops and joins the library's threads. From then on nothing runs a callback; what is posted is leaked on purpose.
// Must be called without the interpreter, which the threads may need to finish what they are doing.
// `go_on` is asked now and then while callbacks take their time; when it says no they are left to themselves.
void shut_down(bool (*go_on)() noexcept = nullptr) noexcept;
bool is_shut_down() noexcept;

}  // namespace cudafuture
