// Destruction of chains of owners without recursion.
//
// Dropping the first of a million chained futures drops its continuation, which drops the second future, and so on.
// Each step calls the reaper: the outermost call in a thread does the work, and the nested ones add theirs to its list.
#pragma once

namespace cudafuture {

class Continuation;

// Drops one foreign reference. Called inside the interpreter only.
void reap_foreign(void* object) noexcept;

// Abandons each continuation of the list: its parent will never be done.
void reap_continuations(Continuation* list) noexcept;

}  // namespace cudafuture
