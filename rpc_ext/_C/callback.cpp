#include "callback.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include "references.h"
#include "seal/pipe.h"

namespace rpc_ext {
namespace {

bool is_ours(const Bytes& payload) { return std::string_view(payload.data(), payload.size()).starts_with(magic); }

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
  const Bytes& payload = request.payload();
  if (request.type() == refused_request) {
    return failed("the message was refused: " + std::string(payload.begin(), payload.end()));
  }
  if (is_ours(payload)) return serve(request, streams);
  return process(request, std::move(streams));
}

c10::intrusive_ptr<rpc::JitFuture> RequestCallback::process(rpc::Message& request,
                                                            std::vector<c10::Stream> streams) const {
  auto making = making_of(request);
  auto answer = RequestCallbackImpl::processMessage(request, std::move(streams));
  if (making) answer->addCallback([making = std::move(making)](rpc::JitFuture&) mutable { making.reset(); });
  return answer;
}

c10::intrusive_ptr<rpc::JitFuture> RequestCallback::serve(const rpc::Message& request,
                                                          const std::vector<c10::Stream>& streams) const {
  const auto reply = std::make_shared<Reply>(rpc::RpcAgent::getCurrentRpcAgent());
  const std::string_view text(request.payload().data(), request.payload().size());
  if (const auto handler = message_handler_of(text)) {
    try {
      if (handler->handle(text.substr(kChannelHeader), request.tensors(), reply)) return reply->future();
    } catch (const std::exception& e) {
      return failed(e.what());
    }
  }
  const c10::MultiStreamGuard guard(streams);
  const Gil gil;
  if (!gil) return failed("the worker is ending");
  try {
    const Bytes& payload = request.payload();
    call_python(serve_.get(), py::bytes(payload.data(), payload.size()), py::cast(request.tensors()), py::cast(reply));
  } catch (const std::exception& e) {
    return failed(e.what());
  }
  return reply->future();
}

}  // namespace rpc_ext
