#include "store/client/writes.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "api/error.h"
#include "api/thread.h"

namespace rpc_ext::store::client {
namespace {

constexpr std::uint64_t kLeastPooled = 1 << 16;  // bytes from which on a buffer of a pool costs less than new memory
constexpr std::uint64_t kQuick = 1 << 15;        // bytes that are copied under the GIL

WriteRequest& write_of(const SentEntry& entry) { return static_cast<WriteRequest&>(*entry.request); }

// Small tensors, copied side by side into one buffer.
class WriteBatch final : public StoreMessage {
 public:
  WriteBatch(WindowPtr window, std::vector<RequestPtr> requests, std::uint64_t nbytes)
      : StoreMessage(std::move(window), Verb::put, entries_of(std::move(requests)), nbytes) {}

  void start() override {
    if (data.defined()) return window->send(*this);  // RPC had no room for it
    if (!window->has_pending(*this)) return;
    std::uint64_t size = 0;
    for (const SentEntry& each : entries) size = next_line(size) + write_of(each).nbytes;
    if (size < kLeastPooled) return fill(bytes_of(size));
    window->buffers().take(size, [self = shared_from_this()](at::Tensor buffer) {
      self->go_on([&] { static_cast<WriteBatch&>(*self).fill(std::move(buffer)); });
    });
  }

  void take(Answer&& answer) override { end_all(answer); }

 private:
  void fill(at::Tensor buffer) {
    if (!window->has_pending(*this)) return;
    data = std::move(buffer);
    for (const auto& [request, error] : copy()) window->end(request, {.error = error});
    for (const SentEntry& each : std::vector(entries)) {
      write_of(each).release();
      try {
        write_of(each).expect_digest(each.digest);
      } catch (const api::Failure&) {
        window->end(each.request, {.error = std::current_exception()});
      }
    }
    if (window->has_pending(*this)) window->send(*this);
  }

  // Copies the tensors into the buffer, and takes their digests. Returns the requests whose tensors cannot be copied.
  std::vector<std::pair<RequestPtr, std::exception_ptr>> copy() {
    std::vector<std::pair<RequestPtr, std::exception_ptr>> failed;
    std::optional<GilRelease> paused;
    if (data.nbytes() > kQuick) paused.emplace();
    auto* const to = static_cast<std::byte*>(data.mutable_data_ptr());
    std::uint64_t end = 0;
    for (SentEntry& each : entries) {
      each.at = next_line(end);
      each.length = 0;
      try {
        const bool is_there = write_of(each).gather(to + each.at);  // false: it has just expired
        if (is_there) each.length = write_of(each).nbytes;
      } catch (const api::Failure&) {  // its storage was freed
        failed.emplace_back(each.request, std::current_exception());
      }
      std::memset(to + end, 0, each.at - end);
      each.digest = api::digest_of(to + each.at, each.length);
      end = each.at + each.length;
    }
    data = alone(data, 0, static_cast<std::int64_t>(end));
    return failed;
  }
};

// A tensor that travels alone, or one part of it.
class WritePart final : public StoreMessage {
 public:
  WritePart(WindowPtr window, WriteRequestPtr request, std::uint32_t part)
      : StoreMessage(std::move(window), Verb::put, {{request, part}}, part_length(request->nbytes, part)),
        request_(std::move(request)),
        begin_(part * kPart) {}

  void start() override {
    if (data.defined()) return window->send(*this);
    if (!window->has_pending(*this)) return;
    const auto source = request_->source();
    if (source == nullptr) return window->release(*this);  // it has just expired
    if (!source->is_on_device()) {
      const GilRelease paused;
      return send_data(source->part(begin_, nbytes));
    }
    source->copy_to_host(begin_, nbytes, [self = shared_from_this()](at::Tensor bytes, std::exception_ptr error) {
      self->go_on_elsewhere([self, bytes = std::move(bytes), error = std::move(error)] {
        if (error != nullptr) std::rethrow_exception(error);
        static_cast<WritePart&>(*self).take_copy(bytes);
      });
    });
  }

  void take(Answer&& answer) override {
    const std::exception_ptr error = errors_of(*this, answer).front();
    if (request_->part_was_written() || error != nullptr) window->end(request_, {.error = error});
    if (error != nullptr && request_->nbytes > kPart) window->abandon(request_);
  }

  void fail(const std::exception_ptr& error) override {
    StoreMessage::fail(error);
    if (request_->nbytes > kPart) window->abandon(request_);
  }

 private:
  void take_copy(const at::Tensor& bytes) {
    if (request_->part_was_copied()) request_->release();
    send_data(bytes);
  }

  void send_data(at::Tensor bytes) {
    entries.front().length = nbytes;
    entries.front().digest = request_->digest_of(begin_, bytes);
    data = std::move(bytes);
    window->send(*this);
  }

  const WriteRequestPtr request_;
  const std::uint64_t begin_;  // in the tensor
};

class DeleteBatch final : public StoreMessage {
 public:
  DeleteBatch(WindowPtr window, std::vector<RequestPtr> requests)
      : StoreMessage(std::move(window), Verb::erase, entries_of(std::move(requests)), 0) {}

  void start() override { window->send(*this); }
  void take(Answer&& answer) override { end_all(answer); }
};

}  // namespace

// ---- WriteRequest

WriteRequest::WriteRequest(SourcePtr source, std::optional<std::uint64_t> expected, OperationPtr operation,
                           std::size_t index)
    : KeyRequest(Verb::put, std::move(operation), index, source->nbytes()),
      dtype(source->dtype()),
      sizes(source->sizes()),
      nbytes(source->nbytes()),
      expected_(expected),
      digest_(expected && nbytes >= kLarge ? api::make_digest(nbytes) : nullptr),
      undigested_(nbytes),
      left_(parts_of(nbytes)),
      uncopied_(parts_of(nbytes)),
      releases_(this->operation),
      source_(std::move(source)) {
  holds = source_->is_on_device() && nbytes < kLarge ? 1 : 0;
}

void WriteRequest::copy_to_host(const WindowPtr& window) {
  const SourcePtr source = this->source();
  if (source == nullptr || !source->is_on_device() || nbytes >= kLarge) return;
  const auto self = std::static_pointer_cast<WriteRequest>(shared_from_this());
  const auto end = [self, window](const std::exception_ptr& error) { window->end(self, {.error = error}); };
  try {
    source->copy_to_host(0, nbytes, [self, window, end](at::Tensor bytes, std::exception_ptr error) {
      api::call_elsewhere([self, window, end, bytes = std::move(bytes), error = std::move(error)] {
        if (error != nullptr) return end(error);
        {
          const std::lock_guard lock(self->mutex_);
          if (self->source_ != nullptr) self->on_host_ = bytes;  // otherwise it has expired
        }
        window->release_hold(self);
      });
    });
  } catch (...) {
    end(std::current_exception());
  }
}

std::vector<MessagePtr> WriteRequest::messages(const WindowPtr& window) {
  if (nbytes < kLarge) return {};
  const auto self = std::static_pointer_cast<WriteRequest>(shared_from_this());
  std::vector<MessagePtr> messages;
  for (std::uint32_t part = 0; part < parts_of(nbytes); ++part) {
    messages.push_back(std::make_shared<WritePart>(window, self, part));
  }
  return messages;
}

MessagePtr WriteRequest::batch(const WindowPtr& window, std::vector<RequestPtr> requests) {
  std::uint64_t all = 0;
  for (const RequestPtr& request : requests) all += request->weight;
  return std::make_shared<WriteBatch>(window, std::move(requests), all);
}

KeyEntry WriteRequest::entry() const {
  KeyEntry entry = KeyRequest::entry();
  entry.dtype = dtype;
  entry.sizes = sizes;
  entry.nbytes = nbytes;
  return entry;
}

WriteRequest::SourcePtr WriteRequest::source() const {
  const std::lock_guard lock(mutex_);
  return source_;
}

void WriteRequest::release() {
  OperationPtr operation;
  SourcePtr source;
  at::Tensor bytes;
  {
    const std::lock_guard lock(mutex_);
    operation.swap(releases_);
    source.swap(source_);
    std::swap(bytes, on_host_);
  }
  if (operation != nullptr) operation->release_source();
}

bool WriteRequest::gather(std::byte* into) const {
  SourcePtr source;
  at::Tensor bytes;
  {
    const std::lock_guard lock(mutex_);
    source = source_;
    bytes = on_host_;
  }
  if (source == nullptr) return false;
  if (bytes.defined()) {
    std::memcpy(into, bytes.const_data_ptr(), nbytes);
  } else {
    source->gather(0, nbytes, into);
  }
  return true;
}

std::uint64_t WriteRequest::digest_of(std::uint64_t at, const at::Tensor& bytes) {
  const GilRelease paused;
  if (digest_ == nullptr) return api::digest_of(bytes.const_data_ptr(), bytes.nbytes());
  const std::uint64_t found = digest_->add(at, bytes.const_data_ptr(), bytes.nbytes());
  if (undigested_.fetch_sub(bytes.nbytes()) == bytes.nbytes()) expect_digest(digest_->value());
  return found;
}

void WriteRequest::expect_digest(std::uint64_t found) const {
  if (!expected_ || *expected_ == found) return;
  throw api::Failure(
      {.kind = api::Problem::Kind::checksum,
       .message = "key '" + key + "': the bytes to be written do not have the digest that was given for them"});
}

MessagePtr DeleteRequest::batch(const WindowPtr& window, std::vector<RequestPtr> requests) {
  return std::make_shared<DeleteBatch>(window, std::move(requests));
}

}  // namespace rpc_ext::store::client
