#include "agent.h"

#include <torch/csrc/distributed/rpc/utils.h>

#include <future>
#include <thread>

namespace rpc_ext {
namespace {

struct RefusedReply : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Failure kind_of(const rpc::JitFuture& future) {
  try {
    std::rethrow_exception(future.exception_ptr());
  } catch (const RefusedReply&) {
    return Failure::refused;
  } catch (...) {
    return rpc::getRPCErrorType(future) == rpc::RPCErrorType::TIMEOUT ? Failure::timeout : Failure::other;
  }
}

void deliver(Held& listener, rpc::JitFuture& future) {
  const Gil gil;
  if (!gil) return;
  try {
    if (future.hasError()) {
      const std::string message = future.tryRetrieveErrorMessage();  // of whatever bytes
      call_python(listener.get().attr("on_error"), py::int_(static_cast<int>(kind_of(future))),
                  py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(message.data(), message.size(), "replace")));
    } else {
      const auto reply = future.constValue().toCustomClass<rpc::Message>();
      call_python(listener.get().attr("on_reply"), py::bytes(reply->payload().data(), reply->payload().size()),
                  py::cast(reply->tensors()));
    }
  } catch (py::error_already_set& e) {
    e.discard_as_unraisable("rpc_ext: completing a call");
  }
  listener.drop();
}

}  // namespace

std::shared_ptr<Agent> Agent::make(const c10::intrusive_ptr<c10d::Store>& store, const Identity& self,
                                   const rpc::TensorPipeRpcBackendOptions& options,
                                   const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
                                   const std::vector<c10::Device>& devices, std::string_view key, py::object serve,
                                   py::object tell) {
  auto sealer = key.empty() ? nullptr : std::make_shared<Sealer>(key, self.rank, self.world_size);
  auto refusals = std::make_shared<Refusals>(std::move(tell));
  return std::shared_ptr<Agent>(new Agent(store, self, options, reverse_device_maps, devices, std::move(sealer),
                                          std::move(refusals), std::move(serve)));
}

Agent::Agent(const c10::intrusive_ptr<c10d::Store>& store, const Identity& self,
             const rpc::TensorPipeRpcBackendOptions& options,
             const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
             const std::vector<c10::Device>& devices, std::shared_ptr<Sealer> sealer,
             std::shared_ptr<Refusals> refusals, py::object serve)
    : TensorPipeAgent(c10::make_intrusive<AgentStore>(store, self.world_size), self.name,
                      static_cast<rpc::worker_id_t>(self.rank), self.world_size, options, reverse_device_maps, devices,
                      std::make_unique<RequestCallback>(sealer, refusals, std::move(serve))),
      sealer_(std::move(sealer)),
      refusals_(std::move(refusals)) {}

c10::intrusive_ptr<rpc::JitFuture> Agent::send(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
                                               float timeout_seconds, const rpc::DeviceMap& device_map) {
  sent_.fetch_add(1, std::memory_order_relaxed);
  if (!sealer_ || !message->isRequest()) {
    return TensorPipeAgent::send(to, std::move(message), timeout_seconds, device_map);
  }
  // A message that is sent again is sealed again: torch keeps the one that it gave.
  auto [frame, counter] = sealer_->seal_request(to.id_, message->type(), message->payload(), message->tensors());
  auto sealed = c10::make_intrusive<rpc::Message>(std::move(frame), std::vector<at::Tensor>(message->tensors()),
                                                  message->type(), message->id());
  return TensorPipeAgent::send(to, std::move(sealed), timeout_seconds, device_map)
      ->then(
          [sealer = sealer_, refusals = refusals_, callee = to.id_, counter = counter](rpc::JitFuture& future) {
            const auto reply = future.value().toCustomClass<rpc::Message>();
            try {
              sealer->open_reply(callee, counter, reply->type(), reply->payload(), reply->tensors());
            } catch (const Refused& refused) {
              refusals->add(refused);
              throw RefusedReply("the reply was refused: " + refused.reason);
            }
            auto opened = without_seal(*reply);
            Storages storages = opened->getStorages();
            return std::tuple<at::IValue, Storages>(std::move(opened), std::move(storages));
          },
          at::AnyClassType::get());
}

void Agent::call(int to, Bytes payload, std::vector<at::Tensor> tensors, float timeout_seconds,
                 std::shared_ptr<Held> listener) {
  expect_storages(tensors);
  auto message =
      c10::make_intrusive<rpc::Message>(std::move(payload), std::move(tensors), rpc::MessageType::PYTHON_CALL);
  const rpc::WorkerInfo& callee = getWorkerInfo(static_cast<rpc::worker_id_t>(to));
  send(callee, std::move(message), timeout_seconds, {})->addCallback([listener](rpc::JitFuture& future) {
    deliver(*listener, future);
  });
}

bool Agent::stop(std::shared_ptr<Agent> agent, std::chrono::duration<double> patience) {
  std::promise<void> done;
  const std::future<void> stopped = done.get_future();
  std::thread([agent = std::move(agent), done = std::move(done)]() mutable {
    agent->shutdown();
    done.set_value();
  }).detach();
  return stopped.wait_for(patience) == std::future_status::ready;
}

}  // namespace rpc_ext
