// Seals between torch's engine and TensorPipe.
//
//     Agent::send ─► TensorPipeAgent::send ─► Agent::pipeWrite ─► SealedPipes::write: serialize, seal ─► Pipe::write ═╗
//                                                                                                                     ║
//     TensorPipeAgent::pipeRead ─► Pipe::readDescriptor ─► SealedPipes::judge: seal, connection ◄══ descriptor ═══════╣
//              │ allocates what was announced                                                                         ║
//              └► SealedPipes::open: check, then tensorpipeDeserialize ◄══ payloads, tensors ═════════════════════════╝
//
// torch's agent has no hook between TensorPipe and its unpickler, so the two functions that pipeRead calls are replaced
// in libtorch_cpu's table of imported functions; see symbols.h.
#pragma once

#include <torch/csrc/distributed/rpc/message.h>
#include <torch/csrc/distributed/rpc/tensorpipe_utils.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "seal/refusals.h"
#include "seal/seal.h"

namespace tensorpipe {
class Error;
class Pipe;
}  // namespace tensorpipe

namespace rpc_ext {

namespace rpc = torch::distributed::rpc;

// The type of a request that was refused: its payload is the reason. No sender can send it, since its type is set here.
inline constexpr auto refused_request = static_cast<rpc::MessageType>(0x1EE);

// Beginning of the error that replaces a refused reply.
inline constexpr std::string_view refused_reply = "the reply was refused: ";

// The connections of an agent whose messages are sealed.
//
// A worker has one connection to this one: that by which its first sealed message came. Its messages are refused on any
// other, so a recorded message that arrives elsewhere changes nothing.
class SealedPipes {
 public:
  using WriteDone = std::function<void(const tensorpipe::Error&)>;

  SealedPipes(std::unique_ptr<Sealer> sealer, std::shared_ptr<Refusals> refusals, bool with_contents)
      : sealer_(std::move(sealer)), refusals_(std::move(refusals)), with_contents_(with_contents) {}

  // Has every message that this process's agent reads from now on checked by `pipes`; by none where that is null. Kept
  // for the life of the process, since messages that were admitted may be read after the agent's end. Throws
  // std::runtime_error where the functions of this build of torch cannot be replaced.
  static void guard(std::shared_ptr<SealedPipes> pipes);

  // Ends that: messages of this process's next agent are not checked, unless `guard` is called again.
  void unguard();

  // Seals and writes a message: a request to the worker `receiver`, or a reply where that is -1.
  void write(const std::shared_ptr<tensorpipe::Pipe>& pipe, int receiver,
             const c10::intrusive_ptr<rpc::Message>& message, std::vector<c10::Device> devices,
             std::vector<c10::Stream> streams, WriteDone done);

  // True if seals cover the contents of tensors. Such tensors have to be on the host.
  bool with_contents() const { return with_contents_; }

 private:
  struct Hooks;
  struct Verdict;

  struct Connection {
    int peer = -1;
    bool is_client = false;
    std::weak_ptr<tensorpipe::Pipe> pipe;      // of a client: an address may be used again
    std::unordered_set<std::int64_t> pending;  // of a client: the numbers of requests without a reply
  };

  Verdict judge(tensorpipe::Pipe* pipe, std::string_view seal, const Parts& announced);
  c10::intrusive_ptr<rpc::Message> open(const Verdict& verdict, const Parts& received,
                                        const std::function<c10::intrusive_ptr<rpc::Message>()>& deserialize,
                                        std::int64_t number);
  c10::intrusive_ptr<rpc::Message> refuse(const Verdict& verdict, const Refused& refused, std::int64_t number);
  Connection& connection(tensorpipe::Pipe* pipe);  // under mutex_
  void bind(tensorpipe::Pipe* pipe, Verdict& verdict);
  void forget(tensorpipe::Pipe* pipe);

  const std::unique_ptr<Sealer> sealer_;
  const std::shared_ptr<Refusals> refusals_;
  const bool with_contents_;
  std::mutex mutex_;  // guards what follows; a leaf
  std::unordered_map<tensorpipe::Pipe*, Connection> connections_;
  std::unordered_set<int> inbound_;  // the workers that have connected to this one
};

}  // namespace rpc_ext
