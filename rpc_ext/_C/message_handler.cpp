#include "message_handler.h"

#include <array>
#include <stdexcept>
#include <utility>

namespace rpc_ext {
namespace {

constexpr std::string_view channel_kind = kAnswerHeader.substr(0, kChannelHeader - 1);  // a header without the number

std::array<std::atomic<MessageHandler*>, 256> native_handlers;  // by the number of the channel

}  // namespace

std::string header_of(unsigned char number) { return std::string(channel_kind) + static_cast<char>(number); }

bool is_of_channel(std::string_view payload) {
  return payload.size() >= kChannelHeader && payload.starts_with(channel_kind);
}

// ---- Reply

Reply::Reply(const std::shared_ptr<rpc::RpcAgent>& agent)
    : agent_(agent), future_(c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get(), agent->getDevices())) {}

// torch's own callbacks of the future refer to the agent, and do not keep it.
Reply::~Reply() {
  if (const auto agent = agent_.lock(); agent && !given_.exchange(true)) {
    future_->setError(std::make_exception_ptr(std::runtime_error("the callee dropped the call without a reply")));
  }
}

bool Reply::send(Bytes payload, std::vector<at::Tensor> tensors) {
  if (given_.exchange(true)) return false;
  const auto agent = agent_.lock();
  if (!agent) return true;
  auto message =
      c10::make_intrusive<rpc::Message>(std::move(payload), std::move(tensors), rpc::MessageType::PYTHON_RET);
  auto storages = message->getStorages();
  future_->markCompleted(std::move(message), std::move(storages));
  return true;
}

// ---- handlers

void set_message_handler(unsigned char number, MessageHandler* handler) { native_handlers[number] = handler; }

MessageHandler* message_handler_of(std::string_view payload) {
  return is_of_channel(payload) ? native_handlers[static_cast<unsigned char>(payload[kChannelHeader - 1])].load()
                                : nullptr;
}

}  // namespace rpc_ext
