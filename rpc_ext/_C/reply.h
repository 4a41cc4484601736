#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <memory>
#include <vector>

namespace rpc_ext {

namespace rpc = torch::distributed::rpc;
using Bytes = std::vector<char>;

// The answer to one call: given once, now or later, by any thread. Dropped without, the caller gets an error. It may
// outlive the agent that would send it; then it goes nowhere.
class Reply {
 public:
  explicit Reply(const std::shared_ptr<rpc::RpcAgent>& agent);
  ~Reply();
  Reply(const Reply&) = delete;
  Reply& operator=(const Reply&) = delete;

  // Future of the message: the agent sends it on completion.
  const c10::intrusive_ptr<rpc::JitFuture>& future() const { return future_; }

  // False if the reply was given before.
  bool send(Bytes payload, std::vector<at::Tensor> tensors);

 private:
  const std::weak_ptr<rpc::RpcAgent> agent_;
  const c10::intrusive_ptr<rpc::JitFuture> future_;
  std::atomic<bool> given_{false};
};

}  // namespace rpc_ext
