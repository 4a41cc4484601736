#pragma once

namespace rpc_ext {

// torch keeps one register of RRefs for the whole process, and with it for ever the agent that was there first: RRefs
// of a later session would send their messages through an agent that has ended. This gives it the current agent, and
// forgets what was left of the session before. Called without the GIL when an agent has been set and nobody calls yet.
void renew_references();

}  // namespace rpc_ext
