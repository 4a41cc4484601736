#include "callback.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include "references.h"
#include "seal/pipe.h"

namespace rpc_ext {
namespace {

c10::intrusive_ptr<rpc::JitFuture> failed(const std::string& message) {
  auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
  future->setError(std::make_exception_ptr(std::runtime_error(message)));
  return future;
}

std::shared_ptr<Making> making_of(const rpc::Message& request) {
  if (request.type() != rpc::MessageType::PYTHON_REMOTE_CALL) return nullptr;
  const auto call = rpc::PythonRemoteCall::fromMessage(request);
  const auto rref = rpc::RRefId::fromIValue(call->retRRefId());
  // If a worker makes an RRef for itself, the two ids are the same, and it counts as a user already.
  return rref == rpc::ForkId::fromIValue(call->retForkId()) ? nullptr : std::make_shared<Making>(rref);
}

}  // namespace

c10::intrusive_ptr<rpc::JitFuture> RequestCallback::processMessage(rpc::Message& request,
                                                                   std::vector<c10::Stream> streams) const {
  const std::string_view payload(request.payload().data(), request.payload().size());
  if (request.type() == refused_request) return failed("the message was refused: " + std::string(payload));
  if (!payload.starts_with(magic)) return process(request, std::move(streams));
  const auto reply = std::make_shared<Reply>(rpc::RpcAgent::getCurrentRpcAgent());
  try {
    MessageHandler* const handler = message_handler_of(payload);
    if (handler == nullptr || !handler->handle(payload.substr(kChannelHeader), request.tensors(), reply)) {
      serve(request, streams, reply);
    }
  } catch (const std::exception& e) {
    return failed(e.what());
  }
  return reply->future();
}

c10::intrusive_ptr<rpc::JitFuture> RequestCallback::process(rpc::Message& request,
                                                            std::vector<c10::Stream> streams) const {
  auto making = making_of(request);
  auto answer = RequestCallbackImpl::processMessage(request, std::move(streams));
  if (making) answer->addCallback([making = std::move(making)](rpc::JitFuture&) mutable { making.reset(); });
  return answer;
}

void RequestCallback::serve(const rpc::Message& request, const std::vector<c10::Stream>& streams,
                            const std::shared_ptr<Reply>& reply) const {
  const c10::MultiStreamGuard guard(streams);
  const Gil gil;
  if (!gil) throw std::runtime_error("the worker is ending");
  const Bytes& payload = request.payload();
  try {
    call_python(serve_.get(), py::bytes(payload.data(), payload.size()), py::cast(request.tensors()), py::cast(reply));
  } catch (const py::error_already_set& e) {  // it needs the GIL
    throw std::runtime_error(e.what());
  }
}

}  // namespace rpc_ext
