#include "seal/pipe.h"

#include <tensorpipe/tensorpipe.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "seal/announcement.h"
#include "seal/symbols.h"

namespace rpc_ext {
namespace {

class ConnectionRefused final : public tensorpipe::BaseError {
 public:
  explicit ConnectionRefused(std::string what) : what_(std::move(what)) {}
  std::string what() const override { return what_; }

 private:
  const std::string what_;
};

bool can_seal_contents(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && !tensor.is_cpu()) return false;
  }
  return true;
}

bool has_other_layouts(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.layout() != c10::kStrided) return true;
  }
  return false;
}

}  // namespace

// The judgement of a message by its announcement. It replaces the seal in the descriptor that torch's engine keeps
// while it reads the message. The cookie tells it from a seal that another process has written.
struct SealedPipes::Verdict {
  std::array<std::uint8_t, 16> cookie = own_cookie();
  SealedPipes* by = nullptr;
  tensorpipe::Pipe* pipe = nullptr;
  bool is_admitted = false;
  bool is_reply = false;   // it was received on a connection that this worker has opened
  bool is_sealed = false;  // a worker of this session has sent it, whether or not it is admitted
  bool is_stray = false;   // a reply to no call that is pending: torch's engine ends the process over one
  Admitted admitted{};
  int sender = -1;
  char reason[64] = {};

  static const std::array<std::uint8_t, 16>& own_cookie() {
    static const auto cookie = [] {
      std::array<std::uint8_t, 16> bytes;
      if (::getentropy(bytes.data(), bytes.size()) != 0) throw std::runtime_error("the system has no random numbers");
      return bytes;
    }();
    return cookie;
  }

  std::string bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }

  static std::optional<Verdict> from(const std::string& bytes) {
    if (bytes.size() != sizeof(Verdict)) return std::nullopt;
    Verdict verdict;
    std::memcpy(static_cast<void*>(&verdict), bytes.data(), sizeof verdict);
    return verdict.cookie == own_cookie() ? std::optional(verdict) : std::nullopt;
  }
};

// The functions that libtorch_cpu calls in place of TensorPipe's readDescriptor and torch's tensorpipeDeserialize.
struct SealedPipes::Hooks {
  using DescriptorRead = tensorpipe::Pipe::read_descriptor_callback_fn;

  static std::atomic<std::shared_ptr<SealedPipes>>& current() {
    static std::atomic<std::shared_ptr<SealedPipes>> pipes;
    return pipes;
  }

  static void read_descriptor(tensorpipe::Pipe* pipe, DescriptorRead done) {
    pipe->readDescriptor([pipe, pipes = current().load(), done = std::move(done)](
                             const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) mutable {
      if (!pipes || error) {
        if (pipes) pipes->forget(pipe);
        descriptor.metadata.clear();
        done(error, std::move(descriptor));
        return;
      }
      const OwnedParts announced = parts_of(descriptor);
      const Verdict verdict = pipes->judge(pipe, descriptor.metadata, announced.view());
      const Parts parts = announced.view();
      const bool can_read = is_readable(parts) && (verdict.is_admitted || is_small(parts));
      if (verdict.is_stray && is_readable(parts) && is_on_host(parts)) {
        pipes->refusals_->add({verdict.reason, verdict.sender});
        skip(pipe, pipes, parts, std::move(done));
      } else if (can_read && !verdict.is_stray) {
        descriptor.metadata = verdict.bytes();
        done(error, std::move(descriptor));
      } else {
        pipes->refusals_->add(
            {verdict.is_admitted ? "it names a device that does not exist" : verdict.reason, verdict.sender});
        pipes->forget(pipe);
        pipe->close();
        const std::string text = std::string(verdict.is_reply ? refused_reply : "the message was refused: ") +
                                 verdict.reason + "; its connection is closed";
        done(tensorpipe::Error(std::make_shared<ConnectionRefused>(text), __FILE__, __LINE__), std::move(descriptor));
      }
    });
  }

  // Reads a message, drops it, and goes on to the next.
  static void skip(tensorpipe::Pipe* pipe, const std::shared_ptr<SealedPipes>& pipes, const Parts& announced,
                   DescriptorRead done) {
    auto memory = std::make_shared<std::vector<std::vector<char>>>();
    const auto new_memory = [&memory](std::uint64_t length) { return memory->emplace_back(length).data(); };
    tensorpipe::Allocation allocation;
    for (const MessagePart& payload : announced.payloads) allocation.payloads.push_back({new_memory(payload.length)});
    for (const MessagePart& tensor : announced.tensors) {
      allocation.tensors.push_back({tensorpipe::CpuBuffer{new_memory(tensor.length)}});
    }
    pipe->read(std::move(allocation),
               [pipe, pipes, memory, done = std::move(done)](const tensorpipe::Error& error) mutable {
                 if (error) {
                   pipes->forget(pipe);
                   done(error, {});
                 } else {
                   read_descriptor(pipe, std::move(done));
                 }
               });
  }

  static c10::intrusive_ptr<rpc::Message> deserialize(const tensorpipe::Descriptor& descriptor,
                                                      rpc::TensorpipeReadBuffers&& buffers) {
    const std::optional<Verdict> verdict = Verdict::from(descriptor.metadata);
    if (!verdict) return rpc::tensorpipeDeserialize(descriptor, std::move(buffers));
    const OwnedParts received = parts_of(descriptor, buffers);
    return verdict->by->open(
        *verdict, received.view(),
        [&] {
          const ReceivedMemory memory(descriptor, buffers);
          auto message = rpc::tensorpipeDeserialize(descriptor, std::move(buffers));
          memory.expect(message->tensors(), verdict->admitted);
          return message;
        },
        *buffers.id);
  }
};

void SealedPipes::guard(std::shared_ptr<SealedPipes> pipes) {
  static std::mutex mutex;
  static std::vector<std::shared_ptr<SealedPipes>>& kept = *new std::vector<std::shared_ptr<SealedPipes>>;
  static bool is_hooked = false;
  const std::lock_guard lock(mutex);
  if (pipes && !is_hooked) {
    // In this order: `deserialize` relies on `read_descriptor`.
    const std::pair<const char*, const void*> hooks[] = {
        {"_ZN10tensorpipe4Pipe14readDescriptorESt8functionIFvRKNS_5ErrorENS_10DescriptorEEE",
         reinterpret_cast<const void*>(&Hooks::read_descriptor)},
        {"_ZN5torch11distributed3rpc21tensorpipeDeserializeERKN10tensorpipe10DescriptorEONS1_21TensorpipeReadBuffersE",
         reinterpret_cast<const void*>(&Hooks::deserialize)}};
    for (const auto& [symbol, hook] : hooks) {
      if (redirect("libtorch_cpu.so", symbol, hook) > 0) continue;
      throw std::runtime_error(
          "this build of torch does not let messages be checked before they are unpickled: it was linked so that its "
          "calls to TensorPipe cannot be redirected. Use a build from PyPI, or begin RPC without a secret");
    }
    is_hooked = true;
  }
  if (pipes) kept.push_back(pipes);
  Hooks::current().store(std::move(pipes));
}

void SealedPipes::unguard() {
  auto current = Hooks::current().load();
  if (current.get() == this) Hooks::current().compare_exchange_strong(current, nullptr);
}

void SealedPipes::write(const std::shared_ptr<tensorpipe::Pipe>& pipe, int receiver,
                        const c10::intrusive_ptr<rpc::Message>& message, std::vector<c10::Device> devices,
                        std::vector<c10::Stream> streams, WriteDone done) {
  const std::int64_t number = message->id();
  auto [serialized, buffers] = rpc::tensorpipeSerialize(message, std::move(devices), streams);
  int peer = receiver;
  {
    const std::lock_guard lock(mutex_);
    Connection& connection = this->connection(pipe.get());
    if (receiver >= 0) {
      if (!connection.is_client) connection = {receiver, true, pipe, {}};
      connection.pending.insert(number);
    }
    peer = connection.peer;
  }
  if (peer >= 0) {  // a reply to a sender that no seal has named is an error, and goes out without one
    const bool with_contents =
        with_contents_ || (has_other_layouts(buffers.tensors) && can_seal_contents(buffers.tensors));
    serialized.metadata = sealer_->seal(receiver >= 0 ? MessageDirection::request : MessageDirection::reply, peer,
                                        number, parts_of(serialized).view(), with_contents);
  }
  pipe->write(std::move(serialized),
              [buffers = std::make_shared<rpc::TensorpipeWriteBuffers>(std::move(buffers)),
               streams = std::move(streams), done = std::move(done)](const tensorpipe::Error& error) { done(error); });
}

SealedPipes::Connection& SealedPipes::connection(tensorpipe::Pipe* pipe) {
  Connection& found = connections_[pipe];
  if (found.is_client && found.pipe.expired()) found = {};  // another pipe had this address
  return found;
}

SealedPipes::Verdict SealedPipes::judge(tensorpipe::Pipe* pipe, std::string_view seal, const Parts& announced) {
  Verdict verdict;
  verdict.by = this;
  verdict.pipe = pipe;
  {
    const std::lock_guard lock(mutex_);
    verdict.is_reply = connection(pipe).is_client;
  }
  try {
    verdict.admitted = sealer_->admit(seal, announced);
    verdict.is_sealed = true;
    verdict.sender = verdict.admitted.sender;
    bind(pipe, verdict);
    sealer_->expect_new(verdict.admitted);
    verdict.is_admitted = true;
  } catch (const Refused& refused) {
    verdict.sender = refused.sender;
    refused.reason.copy(verdict.reason, sizeof verdict.reason - 1);
  }
  return verdict;
}

void SealedPipes::bind(tensorpipe::Pipe* pipe, Verdict& verdict) {
  const Admitted& admitted = verdict.admitted;
  const std::lock_guard lock(mutex_);
  Connection& connection = this->connection(pipe);
  if (connection.is_client) {
    verdict.is_stray = !connection.pending.contains(admitted.number);
    if (verdict.is_stray) throw Refused{"it answers no call", connection.peer};
  } else if (connection.peer != admitted.sender) {
    // The first message of a worker. The connection may have the address of one that has ended, and so its entry.
    if (!inbound_.insert(admitted.sender).second) throw Refused{"its sender has another connection", admitted.sender};
    connection.peer = admitted.sender;
  }
  const MessageDirection expected = connection.is_client ? MessageDirection::reply : MessageDirection::request;
  if (admitted.direction != expected || connection.peer != admitted.sender) {
    throw Refused{"it was signed as another message", admitted.sender};
  }
}

void SealedPipes::forget(tensorpipe::Pipe* pipe) {
  const std::lock_guard lock(mutex_);
  connections_.erase(pipe);  // its place in inbound_ stays taken: torch's agents do not connect twice
}

c10::intrusive_ptr<rpc::Message> SealedPipes::open(const Verdict& verdict, const Parts& received,
                                                   const std::function<c10::intrusive_ptr<rpc::Message>()>& deserialize,
                                                   std::int64_t number) {
  try {
    if (!verdict.is_admitted) throw Refused{verdict.reason, verdict.sender};
    sealer_->check(verdict.admitted, received);
    if (number != verdict.admitted.number) throw Refused{"it was signed as another message", verdict.admitted.sender};
    auto message = deserialize();
    const std::lock_guard lock(mutex_);
    Connection& connection = this->connection(verdict.pipe);
    // An earlier message that was refused may have taken the number since this one was announced.
    if (connection.is_client && connection.pending.erase(number) == 0) {
      throw Refused{"it answers no call", connection.peer};
    }
    return message;
  } catch (const Refused& refused) {
    return refuse(verdict, refused, number);
  } catch (const std::exception& e) {
    return refuse(verdict, {std::string("its tensors cannot be read: ") + e.what(), verdict.sender}, number);
  }
}

// Returns a message in place of a refused one. torch's engine makes an error of it: of the call that the reply claims
// to answer, or of the request at its caller.
c10::intrusive_ptr<rpc::Message> SealedPipes::refuse(const Verdict& verdict, const Refused& refused,
                                                     std::int64_t number) {
  std::string text = refused.reason;
  rpc::MessageType type = refused_request;
  int sender = refused.sender;
  {
    const std::lock_guard lock(mutex_);
    Connection& connection = this->connection(verdict.pipe);
    if (connection.is_client) {
      // torch's engine ends the process over a reply to a call that it does not know. It arms one read for each
      // request, and each read that it completes takes one number, so there is a number left.
      auto& pending = connection.pending;
      if (!pending.contains(number) && !pending.empty()) number = *pending.begin();
      pending.erase(number);
      text.insert(0, refused_reply);
      type = rpc::MessageType::EXCEPTION;
      sender = connection.peer;
    }
  }
  refusals_->add({refused.reason, sender});
  return c10::make_intrusive<rpc::Message>(std::vector<char>(text.begin(), text.end()), std::vector<at::Tensor>(), type,
                                           number);
}

}  // namespace rpc_ext
