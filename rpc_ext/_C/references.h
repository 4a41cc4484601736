#pragma once

#include <torch/csrc/distributed/rpc/types.h>

namespace rpc_ext {

// torch keeps one register of RRefs for the whole process, and with it for ever the agent that was there first: RRefs
// of a later session would send their messages through an agent that has ended. This gives it the current agent, and
// forgets what was left of the session before. Called without the GIL when an agent has been set and nobody calls yet.
void renew_references();

// Counts as a user of an RRef that is being made. Without any user torch lets go of it, though its function still runs;
// it may do so between the moment in which it looks the RRef up to give it the result and the one in which it counts
// its creator, and then whoever asks for the value later asks another RRef, which never has one.
class Making {
 public:
  explicit Making(const torch::distributed::rpc::RRefId& rref);
  ~Making();
  Making(const Making&) = delete;
  Making& operator=(const Making&) = delete;

 private:
  const torch::distributed::rpc::RRefId rref_;
  const torch::distributed::rpc::ForkId use_;
};

}  // namespace rpc_ext
