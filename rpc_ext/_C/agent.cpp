#include "agent.h"

#include <torch/csrc/distributed/rpc/utils.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "api/thread.h"
#include "sendable.h"

namespace rpc_ext {
namespace {

// The worker that this thread sends a request to; -1: it sends a reply.
thread_local int receiver = -1;

struct Sending {
  explicit Sending(int to) { receiver = to; }
  ~Sending() { receiver = -1; }
};

CallFailure kind_of(const rpc::JitFuture& future, std::string_view message) {
  if (message.starts_with(refused_reply)) return CallFailure::refused;
  return rpc::getRPCErrorType(future) == rpc::RPCErrorType::TIMEOUT ? CallFailure::timeout : CallFailure::other;
}

void expect_on_host(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu()) {
      throw std::invalid_argument("a tensor on " + tensor.device().str() +
                                  " cannot be sent under seal=\"contents\": copy it to the host first");
    }
  }
}

// Joins the agent's threads, which take the GIL to end.
void destroy(Agent* agent) {
  const GilRelease without_gil;
  delete agent;
}

void deliver(CallListener& listener, rpc::JitFuture& future) {
  if (is_finalizing()) return;
  try {
    if (future.hasError()) {
      const std::string message = future.tryRetrieveErrorMessage();
      listener.on_error(kind_of(future, message), message);
    } else {
      const auto reply = future.constValue().toCustomClass<rpc::Message>();
      listener.on_reply({reply->payload().data(), reply->payload().size()}, reply->tensors());
    }
  } catch (const std::exception&) {
    if (const Gil gil; gil) report_unraisable("rpc_ext: completing a call");
  }
}

}  // namespace

std::shared_ptr<Agent> Agent::make(const std::vector<std::string>& names, int rank, py::object exchange,
                                   const rpc::TensorPipeRpcBackendOptions& options,
                                   const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
                                   const std::vector<c10::Device>& devices, const Secret& secret, py::object serve,
                                   py::object tell) {
  auto refusals = std::make_shared<Refusals>(std::move(tell));
  std::shared_ptr<SealedPipes> pipes;
  if (!secret.key.empty()) {
    auto sealer = std::make_unique<Sealer>(secret.key, rank, static_cast<int>(names.size()));
    pipes = std::make_shared<SealedPipes>(std::move(sealer), refusals, secret.with_contents);
  }
  SealedPipes::guard(pipes);
  try {
    return {new Agent(names, rank, std::move(exchange), options, reverse_device_maps, devices, pipes,
                      std::move(refusals), std::move(serve)),
            destroy};
  } catch (...) {
    if (pipes) pipes->unguard();
    throw;
  }
}

Agent::Agent(const std::vector<std::string>& names, int rank, py::object exchange,
             const rpc::TensorPipeRpcBackendOptions& options,
             const std::unordered_map<std::string, rpc::DeviceMap>& reverse_device_maps,
             const std::vector<c10::Device>& devices, std::shared_ptr<SealedPipes> pipes,
             std::shared_ptr<Refusals> refusals, py::object serve)
    : TensorPipeAgent(c10::make_intrusive<AgentRendezvous>(names, std::move(exchange)), names.at(rank),
                      static_cast<rpc::worker_id_t>(rank), static_cast<int>(names.size()), options, reverse_device_maps,
                      devices, std::make_unique<RequestCallback>(std::move(serve))),
      pipes_(std::move(pipes)),
      refusals_(std::move(refusals)),
      process_(getpid()) {}

c10::intrusive_ptr<rpc::JitFuture> Agent::send(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
                                               float timeout_seconds, const rpc::DeviceMap& device_map) {
  sent_.fetch_add(1, std::memory_order_relaxed);
  return message->type() == rpc::MessageType::RREF_USER_DELETE
             ? send_elsewhere(to, std::move(message), timeout_seconds)
             : send_now(to, std::move(message), timeout_seconds, device_map);
}

c10::intrusive_ptr<rpc::JitFuture> Agent::send_now(const rpc::WorkerInfo& to, c10::intrusive_ptr<rpc::Message> message,
                                                   float timeout_seconds, const rpc::DeviceMap& device_map) {
  make_sendable(message->tensors());
  if (pipes_ && pipes_->with_contents()) expect_on_host(message->tensors());
  const Sending sending(to.id_);
  return TensorPipeAgent::send(to, std::move(message), timeout_seconds, device_map);
}

c10::intrusive_ptr<rpc::JitFuture> Agent::send_elsewhere(const rpc::WorkerInfo& to,
                                                         c10::intrusive_ptr<rpc::Message> message,
                                                         float timeout_seconds) {
  auto acknowledged = c10::make_intrusive<rpc::JitFuture>(at::AnyClassType::get());
  std::unique_lock lock(deletions_mutex_);
  deletions_.push_back({to, std::move(message), timeout_seconds, acknowledged});
  const bool is_first = deletions_.size() == 1;
  lock.unlock();
  if (is_first) cudafuture::api::call_elsewhere([self = shared_from_this()] { self->send_deletions(); });
  return acknowledged;
}

void Agent::send_deletions() {
  std::unique_lock lock(deletions_mutex_);
  while (!deletions_.empty()) {
    Deletion first = deletions_.front();
    lock.unlock();
    send_deletion(std::move(first));
    lock.lock();
    deletions_.pop_front();  // only now: until it is sent it counts as in flight
  }
}

void Agent::send_deletion(Deletion deletion) {
  const auto acknowledged = deletion.acknowledged;
  try {
    send_now(deletion.to, std::move(deletion.message), deletion.timeout_seconds, {})
        ->addCallback([acknowledged](rpc::JitFuture& reply) {
          if (reply.hasError()) {
            acknowledged->setError(reply.exception_ptr());
          } else {
            acknowledged->markCompleted(reply.constValue(), std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>());
          }
        });
  } catch (const std::exception&) {  // RPC has ended here
    try {
      acknowledged->setError(std::current_exception());
    } catch (const std::exception&) {
      // torch's callback has raised the error again, which ends the use of the reference at the latest.
    }
  }
}

std::unordered_map<std::string, std::string> Agent::getMetrics() {
  auto metrics = TensorPipeAgent::getMetrics();
  const std::lock_guard lock(deletions_mutex_);
  std::string& in_flight = metrics["agent.client_active_calls"];
  in_flight = std::to_string(std::stoul(in_flight) + deletions_.size());
  return metrics;
}

void Agent::pipeWrite(const std::shared_ptr<tensorpipe::Pipe>& pipe, const c10::intrusive_ptr<rpc::Message>& message,
                      std::vector<c10::Device>&& devices, std::vector<c10::Stream> streams,
                      std::function<void(const tensorpipe::Error&)> done) noexcept {
  c10::intrusive_ptr<rpc::Message> sent = message;
  if (receiver < 0) {  // a reply: there is no caller to throw to
    try {
      make_sendable(message->tensors());
    } catch (const TensorFault& e) {
      sent = rpc::createExceptionResponse(e.what(), message->id());
    }
  }
  if (pipes_) {
    pipes_->write(pipe, receiver, sent, std::move(devices), std::move(streams), std::move(done));
  } else {
    TensorPipeAgent::pipeWrite(pipe, sent, std::move(devices), std::move(streams), std::move(done));
  }
}

bool Agent::is_current() const noexcept {
  try {
    return getpid() == process_ && getCurrentRpcAgent().get() == this;
  } catch (const c10::Error&) {  // this process has no agent
    return false;
  }
}

void Agent::call(int to, Bytes payload, std::vector<at::Tensor> tensors, float timeout_seconds,
                 std::shared_ptr<CallListener> listener) {
  const GilRelease without_gil;
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
    if (agent->pipes_) agent->pipes_->unguard();  // no message can come any more
    done.set_value();
  }).detach();
  return stopped.wait_for(patience) == std::future_status::ready;
}

}  // namespace rpc_ext
