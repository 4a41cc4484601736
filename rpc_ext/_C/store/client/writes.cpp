#include "store/client/writes.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace rpc_ext::store::client {
namespace {

constexpr std::uint64_t kLeastPooled = 1 << 16;  // bytes from which on a buffer of a pool costs less than new memory
constexpr std::uint64_t kQuick = 1 << 15;        // bytes that are copied under the GIL

std::uint64_t line_after(std::uint64_t end) { return (end + kLine - 1) / kLine * kLine; }

std::uint64_t size_of_part(std::uint64_t nbytes, std::uint32_t part) {
  return std::min<std::uint64_t>(kPart, nbytes - part * kPart);
}

// Small tensors, copied side by side into one buffer.
class WriteBatch final : public StoreMessage {
 public:
  WriteBatch(WindowPtr window, std::vector<RequestPtr> requests, std::uint64_t nbytes)
      : StoreMessage(std::move(window), Verb::put, std::move(requests), nbytes, true) {}

  void start() override {
    if (data_.defined()) return send();
    if (!expects_answer()) return;
    std::uint64_t room = 0;
    for (const RequestPtr& request : requests) room += line_after(write_of(request).nbytes);
    if (room < kLeastPooled) return fill(bytes_of(room));
    const py::object taken = call(window->buffers.attr("take"), room);
    if (call(taken.attr("done")).cast<bool>()) return fill(call(taken.attr("value")).cast<at::Tensor>());
    window->when_done(taken, [self = shared_from_this()](const py::object& done) {
      auto& batch = static_cast<WriteBatch&>(*self);
      try {
        batch.fill(call(done.attr("value")).cast<at::Tensor>());
      } catch (...) {
        batch.fail();
      }
    });
  }

  void answered(std::string_view body, const std::vector<at::Tensor>& tensors) override {
    data_.reset();
    StoreMessage::answered(body, tensors);
  }

  void failed(const py::object& error) override {
    data_.reset();
    StoreMessage::failed(error);
  }

  void take(Answer&& answer) override { end_all(answer); }

 private:
  struct Place {
    std::uint64_t at, length, digest;
  };

  static WriteRequest& write_of(const RequestPtr& request) { return static_cast<WriteRequest&>(*request); }

  void fail() { failed(error_of(std::current_exception())); }

  void fill(const at::Tensor& buffer) {
    if (!expects_answer()) return;
    copy(buffer);
    if (expects_answer()) send();
  }

  // Copies the tensors into the buffer, and releases them.
  void copy(const at::Tensor& buffer) {
    std::vector<at::Tensor> parts;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
    std::uint64_t end = 0;
    for (const RequestPtr& request : requests) {
      const at::Tensor& data = write_of(request).data;
      parts.push_back(data);
      const std::uint64_t length = data.defined() ? data.nbytes() : 0;  // undefined: it has just expired
      places.emplace_back(line_after(end), length);
      end = places.back().first + length;
    }
    if (end > buffer.nbytes()) throw std::invalid_argument("a tensor has grown while it was written");
    auto* const to = static_cast<std::byte*>(buffer.mutable_data_ptr());
    const auto copy_all = [&] {
      std::uint64_t at = 0;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto [begin, length] = places[i];
        std::memset(to + at, 0, begin - at);
        if (length > 0) std::memcpy(to + begin, parts[i].const_data_ptr(), length);
        at = begin + length;
      }
    };
    if (end <= kQuick) {
      copy_all();
    } else {
      const GilRelease released;
      copy_all();
    }
    parts.clear();
    data_ = alone(buffer, 0, static_cast<std::int64_t>(end));
    const auto digests = window->digests_of(data_, places);
    places_.clear();
    for (std::size_t i = 0; i < requests.size(); ++i) {
      places_[requests[i].get()] = {places[i].first, places[i].second, digests[i]};
    }
    for (const RequestPtr& each : std::vector(requests)) {
      WriteRequest& request = write_of(each);
      request.release();
      if (request.expected.is_none()) continue;
      try {
        call(window->expect_digest, request.key, places_.at(&request).digest, request.expected);
      } catch (py::error_already_set& e) {
        if (!e.matches(window->checksum_error)) throw;
        window->end(each, py::none(), error_of(std::current_exception()));
      }
    }
  }

  void send() {
    window->mark_sent(requests);
    std::vector<KeyEntry> entries;
    for (const RequestPtr& request : requests) {
      const Place& place = places_.at(request.get());
      entries.push_back(write_of(request).put(0, place.at, place.length, place.digest));
    }
    window->send(*this, std::move(entries), data_);
  }

  at::Tensor data_;
  std::unordered_map<const KeyRequest*, Place> places_;
};

// A tensor that travels alone, or one part of it.
class WritePart final : public StoreMessage {
 public:
  WritePart(WindowPtr window, WriteRequestPtr request, std::uint32_t part)
      : StoreMessage(std::move(window), Verb::put, {request}, size_of_part(request->nbytes, part)),
        request_(std::move(request)),
        part_(part) {}

  void start() override {
    if (!expects_answer()) return;
    if (data_.defined()) return send();
    const py::object part = call(request_->source.attr("part"), begin(), nbytes);
    if (!py::isinstance(part, window->future_class)) return take_data(part);
    window->when_done(part, [self = shared_from_this()](const py::object& done) {
      auto& message = static_cast<WritePart&>(*self);
      try {
        message.take_data(call(done.attr("value")));
      } catch (...) {
        message.failed(error_of(std::current_exception()));
      }
    });
  }

  void take(Answer&& answer) override {
    const py::object error = errors_of(answer).front();
    --request_->left;
    if (!error.is_none() || request_->left == 0) window->end(request_, py::none(), error);
    if (!error.is_none() && request_->nbytes > kPart) window->abandon(request_);
  }

  void failed(const py::object& error) override {
    StoreMessage::failed(error);
    if (request_->nbytes > kPart) window->abandon(request_);
  }

 private:
  std::uint64_t begin() const { return part_ * kPart; }

  void take_data(const py::object& data) {
    digest_ = (request_->due.is_none() ? call(window->digest, data) : call(request_->due.attr("add"), begin(), data))
                  .cast<std::uint64_t>();
    data_ = data.cast<at::Tensor>();
    send();
  }

  void send() {
    window->mark_sent({request_});
    window->send(*this, {request_->put(part_, 0, nbytes, digest_)}, data_);
  }

  const WriteRequestPtr request_;
  const std::uint32_t part_;
  at::Tensor data_;
  std::uint64_t digest_ = 0;
};

class DeleteBatch final : public StoreMessage {
 public:
  DeleteBatch(WindowPtr window, std::vector<RequestPtr> requests)
      : StoreMessage(std::move(window), Verb::erase, std::move(requests), 0, true) {}

  void start() override { send_entries(); }
  void take(Answer&& answer) override { end_all(answer); }
};

}  // namespace

// ---- WriteRequest

WriteRequest::WriteRequest(std::string key, py::object source, py::object expected, OperationPtr operation,
                           std::size_t index)
    : KeyRequest(Verb::put, std::move(key), std::move(operation), index, source.attr("nbytes").cast<std::uint64_t>()),
      dtype(source.attr("dtype").cast<at::ScalarType>()),
      sizes(source.attr("shape").cast<std::vector<std::int64_t>>()),
      nbytes(weight),
      left(parts_of(nbytes)),
      source(std::move(source)),
      expected(std::move(expected)),
      is_on_device_(this->source.attr("data").is_none() && nbytes < kLarge) {
  if (const py::object bytes = this->source.attr("data"); !bytes.is_none()) data = bytes.cast<at::Tensor>();
  holds = is_on_device_ ? 1 : 0;
}

void WriteRequest::copy_to_host(const WindowPtr& window) {
  if (!is_on_device_) return;
  const auto go_on = [self = shared(), window](const py::object& done) {
    try {
      self->data = call(done.attr("value")).cast<at::Tensor>();
      window->release_hold(self);
    } catch (...) {
      window->end(self, py::none(), error_of(std::current_exception()));
    }
  };
  try {
    window->when_done(call(source.attr("part"), 0, nbytes), go_on);
  } catch (...) {
    window->end(shared_from_this(), py::none(), error_of(std::current_exception()));
  }
}

std::vector<MessagePtr> WriteRequest::messages(const WindowPtr& window) {
  if (nbytes < kLarge) return {};
  std::vector<MessagePtr> messages;
  for (std::uint32_t part = 0; part < parts_of(nbytes); ++part) {
    messages.push_back(std::make_shared<WritePart>(window, shared(), part));
  }
  return messages;
}

MessagePtr WriteRequest::batch(const WindowPtr& window, std::vector<RequestPtr> requests) {
  std::uint64_t all = 0;
  for (const RequestPtr& request : requests) all += request->weight;
  return std::make_shared<WriteBatch>(window, std::move(requests), all);
}

void WriteRequest::release() {
  data.reset();
  call(source.attr("release"));
}

KeyEntry WriteRequest::put(std::uint32_t part, std::uint64_t at, std::uint64_t length, std::uint64_t found) const {
  KeyEntry entry = KeyRequest::entry();
  entry.dtype = dtype;
  entry.sizes = sizes;
  entry.nbytes = nbytes;
  entry.part = part;
  entry.at = static_cast<std::uint32_t>(at);
  entry.length = static_cast<std::uint32_t>(length);
  entry.digest = found;
  return entry;
}

MessagePtr DeleteRequest::batch(const WindowPtr& window, std::vector<RequestPtr> requests) {
  return std::make_shared<DeleteBatch>(window, std::move(requests));
}

}  // namespace rpc_ext::store::client
