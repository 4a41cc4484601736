#pragma once

#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "callback.h"
#include "python.h"
#include "seal.h"
#include "store.h"

namespace rpc_ext {

// How a call of ours failed before the callee could say anything.
enum class Failure { other = 0, timeout = 1, refused = 2 };

// torch's TensorPipe agent, which seals each request that it sends, whoever makes it, and checks the seal of the reply.
class Agent final : public rpc::TensorPipeAgent {
 public:
  struct Identity {
    std::string name;
    int rank;
    int world_size;
  };

  // An empty key: nothing is signed. `serve(payload, tensors, reply)` answers the calls of ours that come in;
  // `tell(sender, reason)` hears of the first message of each sender that is refused.
  static std::shared_ptr<Agent> make(const c10::intrusive_ptr<c10d::Store>& store, const Identity& self,
                                     const rpc::TensorPipeRpcBackendOptions& options,
                                     const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
                                     const std::vector<c10::Device>& devices, std::string_view key, py::object serve,
                                     py::object tell);

  c10::intrusive_ptr<rpc::JitFuture> send(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
                                          float timeout_seconds, const rpc::DeviceMap& device_map) override;

  // Sends a payload of ours. The listener's on_reply(payload, tensors), or on_error(failure, message), is called once,
  // by a thread of the agent or by this one. Called without the GIL.
  void call(int to, Bytes payload, std::vector<at::Tensor> tensors, float timeout_seconds,
            std::shared_ptr<Held> listener);

  // Closes all connections, fails the calls that are under way, and waits for the functions that run here, as long as
  // `patience`. False where some still run: what they use lives on. Called without the GIL.
  static bool stop(std::shared_ptr<Agent> agent, std::chrono::duration<double> patience);

  // Messages sent so far, whoever made them.
  std::uint64_t sent() const { return sent_.load(); }

  std::map<int, std::uint64_t> refused() const { return refusals_->counts(); }

 private:
  Agent(const c10::intrusive_ptr<c10d::Store>& store, const Identity& self,
        const rpc::TensorPipeRpcBackendOptions& options,
        const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
        const std::vector<c10::Device>& devices, std::shared_ptr<Sealer> sealer, std::shared_ptr<Refusals> refusals,
        py::object serve);

  const std::shared_ptr<Sealer> sealer_;
  const std::shared_ptr<Refusals> refusals_;
  std::atomic<std::uint64_t> sent_{0};
};

}  // namespace rpc_ext
