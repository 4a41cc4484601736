#include "store/client/reads.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace rpc_ext::store::client {
namespace {

constexpr std::uint64_t kGuess = kPack / 128;   // bytes that a tensor of unknown size counts for in a batch
constexpr std::uint64_t kCopiedFast = 1 << 15;  // bytes that are copied under the GIL

using ReadPtr = std::shared_ptr<ReadRequest>;
using PartOf = std::pair<ReadPtr, std::uint32_t>;

// Copies a tensor to its place, in any mode of the thread.
void copy_to(const at::Tensor& place, const at::Tensor& tensor) {
  const c10::InferenceMode mode(place.is_inference());
  const at::NoGradGuard no_grad;
  place.copy_(tensor);
}

at::Tensor bytes_at(const at::Tensor& data, const Found& found) {
  const std::int64_t begin = found.length == 0 ? 0 : found.at;  // views need an aligned offset
  return data.narrow(0, begin, found.length);
}

std::string quoted(const std::string& key) { return py::repr(py::str(key)).cast<std::string>(); }

[[noreturn]] void raise(const py::object& error_class, const std::string& message) {
  PyErr_SetObject(error_class.ptr(), error_class(message).ptr());
  throw py::error_already_set();
}

[[noreturn]] void raise_differs(const Window& window, const std::string& key, const std::string& what) {
  raise(window.checksum_error, "key " + quoted(key) + ": " + what);
}

void expect_received(const Window& window, const std::string& key, std::uint64_t found, std::uint64_t expected) {
  if (found != expected) raise_differs(window, key, "the bytes received are not those that were sent");
}

bool is_whole(const Found& found) { return found.length == found.nbytes; }

// The digests of the tensors of an answer: with the seed of the store where the service has sent none. There is no
// digest of a tensor in parts, whose number is to be ignored.
std::vector<std::uint64_t> digests_of(const Window& window, const Answer& answer) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
  std::vector<std::uint64_t> seeds;
  for (const Found& found : answer.entries) {
    places.emplace_back(found.at, is_whole(found) ? found.length : 0);
    seeds.push_back(found.digest ? 0 : found.seed);
  }
  return window.digests_of(answer.data, places, seeds);
}

std::vector<MessagePtr> fetches(const WindowPtr& window, const std::vector<PartOf>& parts);

// Reads tensors.
class ReadBatch final : public StoreMessage {
 public:
  ReadBatch(WindowPtr window, std::vector<RequestPtr> requests, std::uint64_t nbytes, bool is_batch)
      : StoreMessage(std::move(window), Verb::get, std::move(requests), nbytes, is_batch) {}

  void start() override { send_entries(); }

  void take(Answer&& answer) override {
    const auto digests = digests_of(*window, answer);
    const auto errors = errors_of(answer);
    std::vector<PartOf> rest;
    std::size_t at = 0;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      const auto request = std::static_pointer_cast<ReadRequest>(requests[i]);
      if (!errors[i].is_none()) {
        window->end(request, py::none(), errors[i]);
        continue;
      }
      const Found& found = answer.entries[at];
      const std::uint64_t digest = digests[at++];
      try {
        for (const std::uint32_t part : request->found(*window, found, bytes_at(answer.data, found), digest)) {
          rest.emplace_back(request, part);
        }
      } catch (...) {  // this fails one request; the others have their data
        window->end(request, py::none(), error_of(std::current_exception()));
        window->abandon(request);
      }
    }
    std::erase_if(rest, [](const PartOf& part) { return part.first->is_done(); });
    if (!rest.empty()) window->enqueue(fetches(window, rest));
  }
};

// Fetches parts of tensors that earlier requests have found.
class FetchParts final : public StoreMessage {
 public:
  FetchParts(WindowPtr window, std::vector<PartOf> parts, std::uint64_t nbytes)
      : StoreMessage(std::move(window), Verb::fetch, {}, nbytes), parts_(std::move(parts)) {
    set_requests();
  }

  void start() override {
    std::erase_if(parts_, [](const PartOf& part) { return part.first->is_done(); });
    set_requests();
    if (!expects_answer()) return;
    std::vector<KeyEntry> entries;
    for (const auto& [request, part] : parts_) {
      KeyEntry& entry = entries.emplace_back();
      entry.sequence = request->sequence;
      entry.part = part;
    }
    window->send(*this, std::move(entries), no_data());
  }

  void take(Answer&& answer) override {
    auto errors = errors_of(answer);
    std::size_t at = 0;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const auto& [request, part] = parts_[i];
      py::object& error = errors[i];
      try {
        if (error.is_none()) {
          const Found& found = answer.entries[at++];
          request->take_part(*window, part, bytes_at(answer.data, found), found.digest);
        }
      } catch (...) {
        error = error_of(std::current_exception());
      }
      if (!error.is_none() && window->end(request, py::none(), error)) window->abandon(request);
    }
  }

 private:
  void set_requests() {
    requests.clear();
    for (const auto& [request, part] : parts_) requests.push_back(request);
  }

  std::vector<PartOf> parts_;
};

// The messages that fetch parts: large parts alone, small parts together.
std::vector<MessagePtr> fetches(const WindowPtr& window, const std::vector<PartOf>& parts) {
  std::vector<MessagePtr> messages;
  std::vector<PartOf> together;
  std::uint64_t nbytes = 0;
  for (const PartOf& each : parts) {
    const std::uint64_t length = each.first->size_of_part(each.second);
    if (!together.empty() && (nbytes + length > kPack || together.size() == kMostEntries)) {
      messages.push_back(std::make_shared<FetchParts>(window, std::exchange(together, {}), std::exchange(nbytes, 0)));
    }
    together.push_back(each);
    nbytes += length;
  }
  messages.push_back(std::make_shared<FetchParts>(window, std::move(together), nbytes));
  return messages;
}

}  // namespace

// ---- HostTarget

void HostTarget::expect(const std::string& key, const Found& found) const {
  if (!out_ || (out_->scalar_type() == found.dtype && out_->sizes() == found.sizes)) return;
  const auto text = [](const py::object& object) { return py::repr(object).cast<std::string>(); };
  throw std::invalid_argument("key " + quoted(key) + " is a tensor of " + text(py::cast(found.dtype)) + " " +
                              text(py::list(py::cast(found.sizes))) + ", but the tensor to read into is one of " +
                              text(py::cast(out_->scalar_type())) + " " +
                              text(py::list(py::cast(out_->sizes().vec()))));
}

at::Tensor HostTarget::whole(const Found& found, const at::Tensor& data) {
  const at::Tensor tensor = data.view(found.dtype).reshape(found.sizes);
  if (const std::optional<at::Tensor> out = out_) {  // the end of the request drops out_
    copy_to(*out, tensor);
    return *out;
  }
  if (tensor.storage().nbytes() <= tensor.nbytes()) return tensor;
  at::Tensor alone = at::empty(found.sizes, at::TensorOptions().dtype(found.dtype).device(c10::kCPU));
  std::memcpy(alone.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  return alone;
}

void HostTarget::begin(const Found& found) {
  is_filled_in_place_ = out_ && out_->is_contiguous() && !out_->is_conj() && !out_->is_neg();
  whole_ =
      is_filled_in_place_ ? *out_ : at::empty(found.sizes, at::TensorOptions().dtype(found.dtype).device(c10::kCPU));
  bytes_ = whole_.detach().reshape({-1}).view(at::kByte);
}

void HostTarget::fill(std::uint64_t at, const at::Tensor& data) {
  copy_to(bytes_.narrow(0, static_cast<std::int64_t>(at), data.numel()), data);
}

// ---- ReadRequest

ReadRequest::ReadRequest(std::string key, py::object target, std::optional<at::Tensor> out, bool has_digest,
                         OperationPtr operation, std::size_t index, bool is_second)
    : KeyRequest(Verb::get, std::move(key), std::move(operation), index, out ? out->nbytes() : kGuess),
      nbytes(out ? std::optional<std::uint64_t>(out->nbytes()) : std::nullopt),
      has_digest_(has_digest),
      needs_digest_(has_digest || is_second),
      is_on_device_(!target.is_none()),
      target_(std::move(target)),
      host_(std::move(out)) {}

KeyEntry ReadRequest::entry() const {
  KeyEntry entry = KeyRequest::entry();
  entry.needs_digest = needs_digest_;
  return entry;
}

std::vector<MessagePtr> ReadRequest::messages(const WindowPtr& window) {
  if (!nbytes || *nbytes < kLarge) return {};
  return {std::make_shared<ReadBatch>(window, std::vector<RequestPtr>{shared_from_this()},
                                      std::min<std::uint64_t>(kPart, *nbytes), false)};
}

MessagePtr ReadRequest::batch(const WindowPtr& window, std::vector<RequestPtr> requests) {
  std::uint64_t all = 0;
  for (const RequestPtr& each : requests) all += static_cast<ReadRequest&>(*each).nbytes.value_or(kPart);
  return std::make_shared<ReadBatch>(window, std::move(requests), std::min<std::uint64_t>(kPart, all), true);
}

void ReadRequest::drop() {
  if (!filling_.try_lock()) {
    const GilRelease released;
    filling_.lock();
  }
  is_dropped_ = true;
  filling_.unlock();
  target_ = {};
  host_ = HostTarget({});
}

// Calls a function that fills the target on the host, unless the request is done; returns whether it was called.
template <class Fill>
bool ReadRequest::fill(std::uint64_t nbytes, Fill fill) {
  if (nbytes <= kCopiedFast) {
    if (!is_dropped_) fill();
    return !is_dropped_;
  }
  const GilRelease released;
  const std::lock_guard lock(filling_);
  if (!is_dropped_) fill();
  return !is_dropped_;
}

void ReadRequest::end(Window& window, const py::object& value, std::uint64_t digest) {
  if (operation == nullptr) return;
  if (has_digest_) operation->set_digest(index, digest);
  window.end(shared_from_this(), value, py::none());
}

std::vector<std::uint32_t> ReadRequest::found(Window& window, const Found& found, const at::Tensor& data,
                                              std::uint64_t digest) {
  if (is_done()) return {};
  const py::object target = target_;
  const py::object shape = py::tuple(py::cast(found.sizes));
  host_.expect(key, found);
  found_ = found;
  left_ = parts_of(found.nbytes);
  if (is_whole(found)) {
    expect_digest(found.digest, found.has_kept);
    if (found.digest) {
      expect_received(window, key, digest, *found.digest);
    } else if (digest != found.kept) {
      read_again(window);
      return {};
    }
    py::object value;
    if (is_on_device_) {
      value = call(target.attr("whole"), found.dtype, shape, data);
    } else {
      at::Tensor tensor;
      if (!fill(found.nbytes, [&] { tensor = host_.whole(found, data); })) return {};
      value = py::cast(std::move(tensor));
    }
    end(window, value, digest);
    return {};
  }
  if (is_on_device_) {
    call(target.attr("begin"), found.dtype, shape, found.nbytes);
  } else {
    host_.begin(found);
  }
  if (has_digest_ || found.has_kept) digest_ = call(window.digest_class, found.nbytes);
  std::uint32_t next = 0;
  if (found.length > 0) take_part(window, next++, data, found.digest);
  std::vector<std::uint32_t> rest;
  while (next < parts_of(found.nbytes)) rest.push_back(next++);
  return rest;
}

// Throws unless the reply has a digest with which its bytes can be verified.
void ReadRequest::expect_digest(const std::optional<std::uint64_t>& digest, bool has_kept) const {
  if (!digest && (needs_digest_ || !has_kept))
    throw std::invalid_argument("key " + quoted(key) + ": the reply has no digest");
}

void ReadRequest::take_part(Window& window, std::uint32_t part, const at::Tensor& data,
                            std::optional<std::uint64_t> expected) {
  const std::uint64_t begin = part * kPart;
  if (data.nbytes() != size_of_part(part)) {
    throw std::invalid_argument("key " + quoted(key) + ": a part has " + std::to_string(data.nbytes()) +
                                " bytes, and not " + std::to_string(size_of_part(part)));
  }
  expect_digest(expected, found_.has_kept);
  const py::object digest = digest_.is_none() ? call(window.digest, data) : call(digest_.attr("add"), begin, data);
  if (expected) {
    expect_received(window, key, digest.cast<std::uint64_t>(), *expected);
  }
  if (is_done()) return;
  const py::object target = target_;
  if (is_on_device_) {
    call(target.attr("fill"), begin, data);
  } else if (!fill(data.nbytes(), [&] { host_.fill(begin, data); })) {
    return;
  }
  if (!is_done() && --left_ == 0) end_with_parts(window);
}

// Ends the request: all of its parts were received.
void ReadRequest::end_with_parts(Window& window) {
  std::uint64_t digest = 0;
  if (!digest_.is_none()) {
    const py::object value = digest_.attr("value");
    const bool differs = found_.has_kept && call(value, found_.seed).cast<std::uint64_t>() != found_.kept;
    if (is_done()) return;
    if (differs && !needs_digest_) return read_again(window);
    if (differs) {
      raise_differs(window, key,
                    "its " + std::to_string(found_.nbytes) + " bytes on the disk are not those that were written");
    }
    digest = call(value).cast<std::uint64_t>();
  }
  if (is_done()) return;
  if (is_on_device_) return end(window, call(target_.attr("finish")), digest);
  at::Tensor tensor;
  if (fill(found_.nbytes, [&] { tensor = host_.finish(found_); })) end(window, py::cast(std::move(tensor)), digest);
}

// Reads the key once more: the bytes received are not those that were written, and the service can tell where they have
// changed. A second read could return a later tensor, so the request fails if the caller has used the key since.
void ReadRequest::read_again(Window& window) {
  if (!followers.empty()) {
    raise_differs(window, key,
                  "its " + std::to_string(found_.nbytes) +
                      " bytes have changed on the disk or on the way; read it once more to learn which");
  }
  window.replace(shared_from_this(), std::make_shared<ReadRequest>(key, is_on_device_ ? target_ : py::none(),
                                                                   host_.out(), has_digest_, operation, index, true));
}

std::uint64_t ReadRequest::size_of_part(std::uint32_t part) const {
  return std::min<std::uint64_t>(kPart, found_.nbytes - part * kPart);
}

}  // namespace rpc_ext::store::client
