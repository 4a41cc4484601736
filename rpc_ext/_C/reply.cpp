#include "reply.h"

#include <stdexcept>

namespace rpc_ext {

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

}  // namespace rpc_ext
