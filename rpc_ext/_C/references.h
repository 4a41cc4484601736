#pragma once

#include <torch/csrc/distributed/rpc/types.h>

namespace rpc_ext {

// Gives torch's register of RRefs the current agent, and forgets the RRefs of the session before. The register belongs
// to the whole process and keeps its first agent: RRefs of a later session would send their messages through an agent
// that has ended. Called without the GIL after an agent has been set, before the first call.
void renew_references();

// Counts as a user of an RRef that is being made. Without a user torch drops the RRef, though its function still runs.
// That may happen between two steps of torch: it looks the RRef up, to give it the result, and it counts its creator.
// A later request for the value would then reach another RRef, which never gets one.
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
