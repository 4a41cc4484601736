// Refusal of calls in a forked child: there the lock may never be released, since the other threads are gone.
#pragma once

namespace sim {

void watch_forks() noexcept;  // from now on; once is enough
bool is_forked_child() noexcept;
void refuse_after_fork();  // throws in a child; takes no lock

}  // namespace sim
