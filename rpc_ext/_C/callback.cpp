#include "callback.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/rpc/python_remote_call.h>
#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include "references.h"

namespace rpc_ext {
namespace {

bool is_ours(const Bytes& payload, std::size_t from) {
  return payload.size() >= from + magic.size() && std::string_view(payload.data() + from, magic.size()) == magic;
}

c10::intrusive_ptr<rpc::JitFuture> failed(const std::string& message) {
  auto future = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
  future->setError(std::make_exception_ptr(std::runtime_error(message)));
  return future;
}

std::shared_ptr<Making> making_of(const rpc::Message& request) {
  if (request.type() != rpc::MessageType::PYTHON_REMOTE_CALL) return nullptr;
  const auto call = rpc::PythonRemoteCall::fromMessage(request);
  const auto rref = rpc::RRefId::fromIValue(call->retRRefId());
  // Where a worker makes one for itself the two are the same, and it counts already.
  return rref == rpc::ForkId::fromIValue(call->retForkId()) ? nullptr : std::make_shared<Making>(rref);
}

}  // namespace

void Refusals::add(const Refused& refused) {
  {
    const std::lock_guard lock(mutex_);
    if (++counts_[refused.sender] > 1) return;
  }
  const Gil gil;
  if (!gil) return;
  try {
    call_python(tell_.get(), py::int_(refused.sender), py::str(refused.reason));
  } catch (py::error_already_set& e) {
    e.discard_as_unraisable("rpc_ext: telling of a message that was refused");
  }
}

std::map<int, std::uint64_t> Refusals::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

c10::intrusive_ptr<rpc::Message> without_seal(const rpc::Message& sealed) {
  const Bytes& frame = sealed.payload();
  Bytes payload(frame.begin() + Sealer::header_size, frame.end());
  return c10::make_intrusive<rpc::Message>(std::move(payload), std::vector<at::Tensor>(sealed.tensors()), sealed.type(),
                                           sealed.id());
}

RequestCallback::RequestCallback(std::shared_ptr<Sealer> sealer, std::shared_ptr<Refusals> refusals, py::object serve)
    : sealer_(std::move(sealer)), refusals_(std::move(refusals)), serve_(std::move(serve)) {}

c10::intrusive_ptr<rpc::JitFuture> RequestCallback::processMessage(rpc::Message& request,
                                                                   std::vector<c10::Stream> streams) const {
  if (!sealer_) {
    if (is_ours(request.payload(), 0)) return serve(request, 0, streams);
    return process(request, std::move(streams));
  }
  Sealer::Opened opened;
  try {
    opened = sealer_->open_request(request.type(), request.payload(), request.tensors());
  } catch (const Refused& refused) {
    refusals_->add(refused);
    return failed("the message was refused: " + refused.reason);
  }
  c10::intrusive_ptr<rpc::JitFuture> answer;
  if (is_ours(request.payload(), Sealer::header_size)) {
    answer = serve(request, Sealer::header_size, streams);
  } else {
    answer = process(*without_seal(request), std::move(streams));
  }
  return answer->then(
      [sealer = sealer_, opened](rpc::JitFuture& future) {
        const auto reply = future.value().toCustomClass<rpc::Message>();
        Bytes frame =
            sealer->seal_reply(opened.sender, opened.counter, reply->type(), reply->payload(), reply->tensors());
        auto sealed = c10::make_intrusive<rpc::Message>(std::move(frame), std::vector<at::Tensor>(reply->tensors()),
                                                        reply->type(), reply->id());
        Storages storages = sealed->getStorages();
        return std::tuple<at::IValue, Storages>(std::move(sealed), std::move(storages));
      },
      at::AnyClassType::get());
}

c10::intrusive_ptr<rpc::JitFuture> RequestCallback::process(rpc::Message& request,
                                                            std::vector<c10::Stream> streams) const {
  auto making = making_of(request);
  auto answer = RequestCallbackImpl::processMessage(request, std::move(streams));
  if (making) answer->addCallback([making = std::move(making)](rpc::JitFuture&) mutable { making.reset(); });
  return answer;
}

c10::intrusive_ptr<rpc::JitFuture> RequestCallback::serve(const rpc::Message& request, std::size_t from,
                                                          const std::vector<c10::Stream>& streams) const {
  const auto reply = std::make_shared<Reply>(rpc::RpcAgent::getCurrentRpcAgent());
  const c10::MultiStreamGuard guard(streams);
  const Gil gil;
  if (!gil) return failed("the worker is ending");
  try {
    const Bytes& payload = request.payload();
    call_python(serve_.get(), py::bytes(payload.data() + from, payload.size() - from), py::cast(request.tensors()),
                py::cast(reply));
  } catch (const std::exception& e) {
    return failed(e.what());
  }
  return reply->future();
}

}  // namespace rpc_ext
