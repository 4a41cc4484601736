#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/rpc/tensorpipe_agent.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "callback.h"
#include "python.h"
#include "rendezvous.h"
#include "seal/pipe.h"
#include "seal/refusals.h"

namespace rpc_ext {

// Failure of one of our calls before the callee could reply.
enum class CallFailure { other = 0, timeout = 1, refused = 2 };

// Takes the outcome of one call. A thread of the agent, or the one that makes the call, calls one of its methods, once,
// without the GIL, unless Python is going away. Exceptions of C++ are reported as unraisable; errors of Python do not
// leave the listener. Any thread may drop it.
class CallListener {
 public:
  virtual ~CallListener() = default;
  virtual void on_reply(std::string_view payload, const std::vector<at::Tensor>& tensors) = 0;
  virtual void on_error(CallFailure kind, const std::string& message) = 0;  // of whatever bytes
};

// torch's TensorPipe agent. With a key it seals every message that it sends, and takes none without a seal.
class Agent final : public rpc::TensorPipeAgent, public std::enable_shared_from_this<Agent> {
 public:
  // The key that seals the messages of a session. Without a key they are not sealed.
  struct Secret {
    std::string_view key;
    bool with_contents;  // the seals cover the contents of tensors
  };

  // `exchange(address)` returns the addresses of all workers, by rank. `serve(payload, tensors, reply)` answers calls
  // of ours. `tell(sender, reason)` is called for the first message of each sender that is refused.
  static std::shared_ptr<Agent> make(const std::vector<std::string>& names, int rank, py::object exchange,
                                     const rpc::TensorPipeRpcBackendOptions& options,
                                     const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
                                     const std::vector<c10::Device>& devices, const Secret& secret, py::object serve,
                                     py::object tell);

  // Sends a message; returns a future of its reply.
  //
  // Messages that end a worker's use of an RRef are sent by another thread. torch sends them under a lock that threads
  // of Python take with the GIL, when they drop an RRef. TensorPipe runs the callbacks of other messages in any thread
  // that sends, and a callback that drops a tensor may wait for the GIL.
  c10::intrusive_ptr<rpc::JitFuture> send(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
                                          float timeout_seconds, const rpc::DeviceMap& device_map) override;

  // torch's numbers. Calls in flight include the messages that are yet to be sent.
  std::unordered_map<std::string, std::string> getMetrics() override;

  // Sends a payload of ours. Called with or without the GIL, which is released meanwhile: torch takes locks under which
  // other threads wait for the GIL.
  void call(int to, Bytes payload, std::vector<at::Tensor> tensors, float timeout_seconds,
            std::shared_ptr<CallListener> listener);

  // Closes all connections, fails the calls in flight, and waits for the functions that run here, as long as
  // `patience`. False if some still run: the objects that they use stay alive. Called without the GIL.
  static bool stop(std::shared_ptr<Agent> agent, std::chrono::duration<double> patience);

  // False once torch's shutdown has removed it, and in a forked process.
  bool is_current() const noexcept;

  // Number of messages sent so far, by all callers.
  std::uint64_t sent() const { return sent_.load(); }

  // See Refusals::counts.
  std::map<int, std::uint64_t> refused() const { return refusals_->counts(); }

 protected:
  void pipeWrite(const std::shared_ptr<tensorpipe::Pipe>& pipe, const c10::intrusive_ptr<rpc::Message>& message,
                 std::vector<c10::Device>&& devices, std::vector<c10::Stream> streams,
                 std::function<void(const tensorpipe::Error&)> done) noexcept override;

 private:
  Agent(const std::vector<std::string>& names, int rank, py::object exchange,
        const rpc::TensorPipeRpcBackendOptions& options,
        const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
        const std::vector<c10::Device>& devices, std::shared_ptr<SealedPipes> pipes, std::shared_ptr<Refusals> refusals,
        py::object serve);

  struct Deletion {
    rpc::WorkerInfo to;
    c10::intrusive_ptr<rpc::Message> message;
    float timeout_seconds;
    c10::intrusive_ptr<rpc::JitFuture> acknowledged;
  };

  c10::intrusive_ptr<rpc::JitFuture> send_now(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
                                              float timeout_seconds, const rpc::DeviceMap& device_map);
  c10::intrusive_ptr<rpc::JitFuture> send_elsewhere(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
                                                    float timeout_seconds);
  void send_deletions();
  void send_deletion(Deletion deletion);

  const std::shared_ptr<SealedPipes> pipes_;  // null: messages are not sealed
  const std::shared_ptr<Refusals> refusals_;
  const pid_t process_;
  std::atomic<std::uint64_t> sent_{0};
  std::mutex deletions_mutex_;      // guards what follows
  std::deque<Deletion> deletions_;  // the first one is being sent
};

}  // namespace rpc_ext
