#include "message_handler.h"

#include <array>
#include <mutex>
#include <utility>

namespace rpc_ext {
namespace {

std::mutex handlers_mutex;  // guards the handlers; nothing is taken under it
std::array<std::shared_ptr<MessageHandler>, 256> message_handlers;

}  // namespace

void set_message_handler(unsigned char number, std::shared_ptr<MessageHandler> handler) {
  const std::lock_guard lock(handlers_mutex);
  message_handlers.at(number).swap(handler);
}

std::shared_ptr<MessageHandler> message_handler_of(std::string_view payload) {
  if (payload.size() < kChannelHeader || payload[kChannelHeader - 2] != kChannelKind) return nullptr;
  const std::lock_guard lock(handlers_mutex);
  return message_handlers[static_cast<unsigned char>(payload[kChannelHeader - 1])];
}

}  // namespace rpc_ext
