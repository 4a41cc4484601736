// Takes apart what owns what owns what, without recursion.
//
// Dropping the first of a million chained futures drops its continuation, which drops the second future, and so on.
// Each step lands here: the outermost one in a thread does the work, those inside it leave theirs on its list.
#pragma once

namespace cudafuture {

class Continuation;

// Drops one reference of the embedding language. Called inside the interpreter only.
void reap_foreign(void* object) noexcept;

// Abandons each continuation of the list: its parent will never be done.
void reap_continuations(Continuation* list) noexcept;

}  // namespace cudafuture
