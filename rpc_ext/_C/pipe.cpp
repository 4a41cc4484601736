#include "pipe.h"

#include <tensorpipe/tensorpipe.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "symbols.h"

namespace rpc_ext {
namespace {

constexpr std::size_t payload_count = 4;  // of a message of torch's: see Parts
// Bytes that a message without a valid seal may announce: it is read then, and refused by itself. Of a larger one
// nothing is allocated, and its connection is closed.
constexpr std::uint64_t most_unverified = 1 << 20;

class ConnectionRefused final : public tensorpipe::BaseError {
 public:
  explicit ConnectionRefused(std::string what) : what_(std::move(what)) {}
  std::string what() const override { return what_; }

 private:
  const std::string what_;
};

template <class T>
std::int32_t target_of(const T& tensor) {
  const bool is_device = tensor.targetDevice.has_value() && tensor.targetDevice->type != tensorpipe::kCpuDeviceType;
  return is_device ? tensor.targetDevice->index : -1;
}

struct OwnedParts {
  std::vector<Part> payloads, tensors;
  Parts view() const { return {payloads, tensors}; }
};

OwnedParts parts_of(const tensorpipe::Message& message) {
  OwnedParts parts;
  for (const auto& payload : message.payloads) parts.payloads.push_back({payload.length, -1, payload.data});
  for (const auto& tensor : message.tensors) {
    const bool on_host = tensor.buffer.device().type == tensorpipe::kCpuDeviceType;
    const void* data = on_host ? tensor.buffer.unwrap<tensorpipe::CpuBuffer>().ptr : nullptr;
    parts.tensors.push_back({tensor.length, target_of(tensor), data});
  }
  return parts;
}

OwnedParts parts_of(const tensorpipe::Descriptor& descriptor) {
  OwnedParts parts;
  for (const auto& payload : descriptor.payloads) parts.payloads.push_back({payload.length});
  for (const auto& tensor : descriptor.tensors) parts.tensors.push_back({tensor.length, target_of(tensor)});
  return parts;
}

OwnedParts parts_of(const tensorpipe::Descriptor& descriptor, const rpc::TensorpipeReadBuffers& buffers) {
  OwnedParts parts = parts_of(descriptor);
  const void* const data[payload_count] = {buffers.type.get(), buffers.id.get(), buffers.payload.data(),
                                           buffers.pickle.data()};
  for (std::size_t i = 0; i < payload_count; i++) parts.payloads[i].data = data[i];
  for (std::size_t i = 0; i < parts.tensors.size(); i++) {
    if (parts.tensors[i].device < 0) parts.tensors[i].data = buffers.tensors[i].get();
  }
  return parts;
}

// Whether torch's engine can allocate what a descriptor announces. It ends the process over what it does not know.
bool is_readable(const tensorpipe::Descriptor& descriptor) {
  if (descriptor.payloads.size() != payload_count || descriptor.payloads[0].length != sizeof(rpc::MessageType) ||
      descriptor.payloads[1].length != sizeof(std::int64_t)) {
    return false;
  }
  for (const auto& tensor : descriptor.tensors) {
    if (!tensor.targetDevice.has_value()) return false;
    const std::string& type = tensor.targetDevice->type;
    if (type != tensorpipe::kCpuDeviceType && type != tensorpipe::kCudaDeviceType) return false;
  }
  return true;
}

bool is_small(const Parts& announced) {
  std::uint64_t total = 0;
  for (const auto parts : {announced.payloads, announced.tensors}) {
    for (const Part& part : parts) {
      if (part.device >= 0 || part.length > most_unverified) return false;
      if ((total += part.length + 64) > most_unverified) return false;
    }
  }
  return true;
}

bool is_on_host(const Parts& announced) {
  return std::all_of(announced.tensors.begin(), announced.tensors.end(), [](const Part& t) { return t.device < 0; });
}

bool is_within_its_storage(const at::Tensor& tensor) {
  std::int64_t last = tensor.storage_offset();
  if (last < 0) return false;
  if (tensor.numel() == 0) return true;
  for (std::int64_t i = 0; i < tensor.dim(); i++) {
    std::int64_t reach = 0;
    if (tensor.stride(i) < 0 || __builtin_mul_overflow(tensor.size(i) - 1, tensor.stride(i), &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      return false;
    }
  }
  return static_cast<std::uint64_t>(last) < tensor.storage().nbytes() / tensor.itemsize();
}

// Throws Refused unless each tensor lies in memory that has come with the message.
class ReceivedMemory {
 public:
  ReceivedMemory(const tensorpipe::Descriptor& descriptor, const rpc::TensorpipeReadBuffers& buffers) {
    for (std::size_t i = 0; i < buffers.tensors.size(); i++) {
      lengths_[buffers.tensors[i].get()] = descriptor.tensors[i].length;
    }
  }

  void expect(const std::vector<at::Tensor>& tensors, const Admitted& admitted) const {
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      if (tensor.layout() != c10::kStrided) {  // its indices are contents, and reach into memory
        if (!admitted.has_contents) throw Refused{"the indices of a sparse tensor are not signed", admitted.sender};
        continue;
      }
      const std::size_t size = tensor.storage().nbytes();
      const auto found = lengths_.find(tensor.storage().data());
      if (size > 0 && (found == lengths_.end() || found->second < size)) {
        throw Refused{"a tensor is larger than the memory that came for it", admitted.sender};
      }
      if (!is_within_its_storage(tensor)) throw Refused{"a tensor reaches beyond its memory", admitted.sender};
    }
  }

 private:
  std::unordered_map<const void*, std::uint64_t> lengths_;
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

// What was found of a message when it was announced. It takes the seal's place in the descriptor that torch's engine
// keeps while it reads the message.
struct SealedPipes::Verdict {
  SealedPipes* by = nullptr;
  tensorpipe::Pipe* pipe = nullptr;
  bool is_admitted = false;
  bool is_reply = false;   // it has come by a connection that this worker has opened
  bool is_sealed = false;  // a worker of this session has sent it, whether or not it is admitted
  bool is_stray = false;   // a reply to no call that is pending: torch's engine ends the process over one
  Admitted admitted{};
  int sender = -1;
  char reason[64] = {};

  std::string bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }

  static std::optional<Verdict> from(const std::string& bytes) {
    if (bytes.size() != sizeof(Verdict)) return std::nullopt;
    Verdict verdict;
    std::memcpy(static_cast<void*>(&verdict), bytes.data(), sizeof verdict);
    return verdict;
  }
};

// What libtorch_cpu calls in place of TensorPipe's readDescriptor and torch's tensorpipeDeserialize.
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
      const bool is_known = is_readable(descriptor) && (verdict.is_sealed || is_small(announced.view()));
      if (is_known && verdict.is_stray && is_on_host(announced.view())) {
        pipes->refusals_->add({verdict.reason, verdict.sender});
        skip(pipe, announced.view(), std::move(done));
      } else if (is_known && !verdict.is_stray) {
        descriptor.metadata = verdict.bytes();
        done(error, std::move(descriptor));
      } else {
        pipes->refusals_->add({verdict.reason, verdict.sender});
        pipe->close();
        const std::string text = std::string(verdict.is_reply ? refused_reply : "the message was refused: ") +
                                 verdict.reason + "; its connection is closed";
        done(tensorpipe::Error(std::make_shared<ConnectionRefused>(text), __FILE__, __LINE__), std::move(descriptor));
      }
    });
  }

  // Reads a message, drops it, and goes on to the next.
  static void skip(tensorpipe::Pipe* pipe, const Parts& announced, DescriptorRead done) {
    auto memory = std::make_shared<std::vector<std::vector<char>>>();
    const auto new_memory = [&memory](std::uint64_t length) { return memory->emplace_back(length).data(); };
    tensorpipe::Allocation allocation;
    for (const Part& payload : announced.payloads) allocation.payloads.push_back({new_memory(payload.length)});
    for (const Part& tensor : announced.tensors) {
      allocation.tensors.push_back({tensorpipe::CpuBuffer{new_memory(tensor.length)}});
    }
    pipe->read(std::move(allocation), [pipe, memory, done = std::move(done)](const tensorpipe::Error& error) mutable {
      if (error) {
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
    constexpr const char* library = "libtorch_cpu.so";
    const auto read_descriptor =
        redirect(library, "_ZN10tensorpipe4Pipe14readDescriptorESt8functionIFvRKNS_5ErrorENS_10DescriptorEEE",
                 reinterpret_cast<const void*>(&Hooks::read_descriptor));
    const auto deserialize = redirect(library,
                                      "_ZN5torch11distributed3rpc21tensorpipeDeserializeERKN10tensorpipe10DescriptorE"
                                      "ONS1_21TensorpipeReadBuffersE",
                                      reinterpret_cast<const void*>(&Hooks::deserialize));
    if (read_descriptor == 0 || deserialize == 0) {
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
    serialized.metadata = sealer_->seal(receiver >= 0 ? Direction::request : Direction::reply, peer, number,
                                        parts_of(serialized).view(), with_contents);
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
  Verdict verdict{this, pipe};
  {
    const std::lock_guard lock(mutex_);
    verdict.is_reply = connection(pipe).is_client;
  }
  try {
    verdict.admitted = sealer_->admit(seal, announced);
    verdict.is_sealed = true;
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
  } else if (connection.peer < 0) {
    if (!inbound_.insert(admitted.sender).second) throw Refused{"its sender has another connection", admitted.sender};
    connection.peer = admitted.sender;
  }
  const Direction expected = connection.is_client ? Direction::reply : Direction::request;
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
    connection(verdict.pipe).pending.erase(number);
    return message;
  } catch (const Refused& refused) {
    return refuse(verdict, refused, number);
  } catch (const std::exception& e) {
    return refuse(verdict, {std::string("its tensors cannot be read: ") + e.what(), verdict.sender}, number);
  }
}

// A message of which torch's engine makes an error: of the call that a reply claims to answer, or at the caller.
c10::intrusive_ptr<rpc::Message> SealedPipes::refuse(const Verdict& verdict, const Refused& refused,
                                                     std::int64_t number) {
  std::string text = refused.reason;
  rpc::MessageType type = refused_request;
  int sender = refused.sender;
  {
    const std::lock_guard lock(mutex_);
    Connection& connection = this->connection(verdict.pipe);
    if (connection.is_client) {
      // torch's engine ends the process over a reply to a call that it does not know. It reads a reply for each request
      // that is pending here, so there is one.
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
