// Messages of a channel that native code handles, without the interpreter, and the replies to calls.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace rpc_ext {

namespace rpc = torch::distributed::rpc;
using Bytes = std::vector<char>;

// The header of a message of a channel: the magic, the kind of the payload, the number of the channel. The answer has
// number 0. Other kinds of payloads are written in Python; see _codec.py.
inline constexpr std::string_view kAnswerHeader(
    "\xCF"
    "cf1\x05\x00",
    6);
inline constexpr std::size_t kChannelHeader = kAnswerHeader.size();

// First bytes of our payloads: no pickle begins with them.
inline constexpr std::string_view magic = kAnswerHeader.substr(0, 4);

// Returns the header of a message to the channel `number`.
std::string header_of(unsigned char number);

// Returns true if a payload is a message of a channel, or the answer to one.
bool is_of_channel(std::string_view payload);

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

class MessageHandler {
 public:
  virtual ~MessageHandler() = default;

  // Handles the body of a message. False: nothing was done, and the handler in Python is to take the message. Called on
  // a thread of the agent, without the GIL; it must not block.
  virtual bool handle(std::string_view body, const std::vector<at::Tensor>& tensors,
                      const std::shared_ptr<Reply>& reply) = 0;
};

// Sets the native handler of the channel `number` in this process; null: there is none. It lives as long as the
// process.
void set_message_handler(unsigned char number, MessageHandler* handler);

// Returns the native handler of a payload; null if the payload is no message of a channel that has one.
MessageHandler* message_handler_of(std::string_view payload);

}  // namespace rpc_ext
