// Messages of a channel that native code handles, without the interpreter.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "reply.h"

namespace rpc_ext {

// First bytes of our payloads: no pickle begins with them.
inline constexpr std::string_view magic(
    "\xCF"
    "cf1",
    4);

// The beginning of a message: the magic, the kind, the number of the channel. An answer has number 0.
inline constexpr char kChannelKind = 5;
inline constexpr std::size_t kChannelHeader = 6;

inline constexpr std::string_view kAnswerHeader(
    "\xCF"
    "cf1\x05\x00",
    kChannelHeader);

inline std::string header_of(unsigned char number) {
  return std::string(kAnswerHeader.substr(0, kChannelHeader - 1)) + static_cast<char>(number);
}

class MessageHandler {
 public:
  virtual ~MessageHandler() = default;

  // Handles the body of a message. False: nothing was done, and the handler in Python is to take the message. Called on
  // a thread of the agent, without the GIL; it must not block.
  virtual bool handle(std::string_view body, const std::vector<at::Tensor>& tensors,
                      const std::shared_ptr<Reply>& reply) = 0;
};

// The native handlers of this process, by number.
//
// Lock: mutex guards the handlers; nothing is taken under it.
struct MessageHandlers {
  std::mutex mutex;
  std::array<std::shared_ptr<MessageHandler>, 256> handlers;
};
inline MessageHandlers message_handlers;

// Null: there is none.
inline void set_message_handler(unsigned char number, std::shared_ptr<MessageHandler> handler) {
  const std::lock_guard lock(message_handlers.mutex);
  message_handlers.handlers.at(number).swap(handler);
}

// A payload is a message of a channel, or the answer to one.
inline bool is_of_channel(std::string_view payload) {
  return payload.size() >= kChannelHeader && payload.starts_with(kAnswerHeader.substr(0, kChannelHeader - 1));
}

// The native handler of a payload; null where the payload is no message of a channel that has one.
inline std::shared_ptr<MessageHandler> message_handler_of(std::string_view payload) {
  if (payload.size() < kChannelHeader || payload[kChannelHeader - 2] != kChannelKind) return nullptr;
  const std::lock_guard lock(message_handlers.mutex);
  return message_handlers.handlers[static_cast<unsigned char>(payload[kChannelHeader - 1])];
}

}  // namespace rpc_ext
