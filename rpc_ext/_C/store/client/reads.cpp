#include "store/client/reads.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "api/error.h"

namespace rpc_ext::store::client {
namespace {

constexpr std::uint64_t kGuess = kPack / 128;  // bytes that a tensor of unknown size counts for in a batch

using ReadPtr = std::shared_ptr<ReadRequest>;

ReadPtr read_of(const SentEntry& entry) { return std::static_pointer_cast<ReadRequest>(entry.request); }

at::Tensor bytes_at(const at::Tensor& data, const Found& found) {
  const std::int64_t begin = found.length == 0 ? 0 : found.at;  // views need an aligned offset
  return data.narrow(0, begin, found.length);
}

std::uint64_t digest_of(const at::Tensor& bytes, std::uint64_t seed = 0) {
  return api::digest_of(bytes.const_data_ptr(), bytes.nbytes(), seed);
}

api::Failure differs(const std::string& key, const std::string& what) {
  return api::Failure({.kind = api::Problem::Kind::checksum, .message = "key '" + key + "': " + what});
}

void expect_received(const std::string& key, std::uint64_t found, std::uint64_t expected) {
  if (found != expected) throw differs(key, "the bytes received are not those that were sent");
}

bool is_whole(const Found& found) { return found.length == found.nbytes; }

std::vector<MessagePtr> fetches(const WindowPtr& window, const std::vector<SentEntry>& parts);

// Reads tensors.
class ReadBatch final : public StoreMessage {
 public:
  ReadBatch(WindowPtr window, std::vector<RequestPtr> requests, std::uint64_t nbytes)
      : StoreMessage(std::move(window), Verb::get, entries_of(std::move(requests)), nbytes) {}

  void start() override { window->send(*this); }

  void take(Answer&& answer) override {
    const auto errors = errors_of(*this, answer);
    std::vector<SentEntry> rest;
    std::size_t at = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const ReadPtr request = read_of(entries[i]);
      if (errors[i] != nullptr) {
        window->end(request, {.error = errors[i]});
        continue;
      }
      const Found& found = answer.entries[at++];
      try {
        for (const std::uint32_t part : request->take_first(*window, found, bytes_at(answer.data, found))) {
          rest.push_back({request, part});
        }
      } catch (...) {  // this fails one request; the others have their data
        window->end(request, {.error = std::current_exception()});
        window->abandon(request);
      }
    }
    std::erase_if(rest, [&](const SentEntry& part) { return window->is_done(*part.request); });
    if (!rest.empty()) window->enqueue(fetches(window, rest));
  }
};

// Fetches parts of tensors that earlier requests have found.
class FetchParts final : public StoreMessage {
 public:
  FetchParts(WindowPtr window, std::vector<SentEntry> parts, std::uint64_t nbytes)
      : StoreMessage(std::move(window), Verb::fetch, std::move(parts), nbytes) {}

  void start() override { window->send(*this); }

  void take(Answer&& answer) override {
    auto errors = errors_of(*this, answer);
    std::size_t at = 0;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const ReadPtr request = read_of(entries[i]);
      try {
        if (errors[i] == nullptr) {
          const Found& found = answer.entries[at++];
          request->take_part(*window, entries[i].part, bytes_at(answer.data, found), found.digest);
        }
      } catch (...) {
        errors[i] = std::current_exception();
      }
      if (errors[i] != nullptr && window->end(request, {.error = errors[i]})) window->abandon(request);
    }
  }
};

// Returns the messages that fetch parts: large parts alone, small parts together.
std::vector<MessagePtr> fetches(const WindowPtr& window, const std::vector<SentEntry>& parts) {
  std::vector<MessagePtr> messages;
  std::vector<SentEntry> together;
  std::uint64_t nbytes = 0;
  for (const SentEntry& each : parts) {
    const std::uint64_t length = read_of(each)->size_of_part(each.part);
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

ReadRequest::ReadRequest(OperationPtr operation, std::size_t index, bool is_second)
    : KeyRequest(Verb::get, operation, index, operation->targets().nbytes(index).value_or(kGuess)),
      nbytes(operation->targets().nbytes(index)),
      needs_digest_(is_second || operation->needs_digests()),
      fills_(std::move(operation)) {}

KeyEntry ReadRequest::entry() const {
  KeyEntry entry = KeyRequest::entry();
  entry.needs_digest = needs_digest_;
  return entry;
}

std::vector<MessagePtr> ReadRequest::messages(const WindowPtr& window) {
  if (!nbytes || *nbytes < kLarge) return {};
  return {std::make_shared<ReadBatch>(window, std::vector<RequestPtr>{shared_from_this()},
                                      std::min<std::uint64_t>(kPart, *nbytes))};
}

MessagePtr ReadRequest::batch(const WindowPtr& window, std::vector<RequestPtr> requests) {
  std::uint64_t all = 0;
  for (const RequestPtr& each : requests) all += static_cast<ReadRequest&>(*each).nbytes.value_or(kPart);
  return std::make_shared<ReadBatch>(window, std::move(requests), std::min<std::uint64_t>(kPart, all));
}

void ReadRequest::drop() {
  const GilRelease paused;  // another thread may be copying
  OperationPtr operation;
  const std::lock_guard lock(filling_);
  operation.swap(fills_);
}

// Calls a function that fills the target, unless the request is done; returns whether it was called.
template <class Fill>
bool ReadRequest::fill(Fill fill) {
  const std::lock_guard lock(filling_);
  if (fills_ == nullptr) return false;
  fill(fills_->targets());
  return true;
}

void ReadRequest::begin(api::Targets& targets) const {
  try {
    targets.begin(index, found_.dtype, found_.sizes);
  } catch (const api::Failure& e) {
    api::Problem problem = e.problem();
    if (problem.kind == api::Problem::Kind::value) problem.message.insert(0, "key '" + key + "' is ");
    throw api::Failure(std::move(problem));
  }
}

void ReadRequest::end(Window& window, std::uint64_t digest) {
  window.end(shared_from_this(), {.nbytes = found_.nbytes, .digest = digest});
}

std::vector<std::uint32_t> ReadRequest::take_first(Window& window, const Found& found, const at::Tensor& data) {
  found_ = found;
  left_ = parts_of(found.nbytes);
  if (is_whole(found)) {
    take_whole(window, data);
    return {};
  }
  if (!fill([&](api::Targets& targets) { begin(targets); })) return {};
  if (needs_digest_ || found.has_kept) digest_ = api::make_digest(found.nbytes);
  std::uint32_t next = 0;
  if (found.length > 0) take_part(window, next++, data, found.digest);
  std::vector<std::uint32_t> rest;
  while (next < parts_of(found.nbytes)) rest.push_back(next++);
  return rest;
}

// Takes a tensor that the service has sent in one part.
void ReadRequest::take_whole(Window& window, const at::Tensor& data) {
  expect_digest(found_.digest);
  const std::uint64_t digest = digest_of(data, found_.digest ? 0 : found_.seed);
  if (found_.digest) {
    expect_received(key, digest, *found_.digest);
  } else if (digest != found_.kept) {
    return read_again(window);
  }
  const bool is_filled = fill([&](api::Targets& targets) {
    const bool is_alone = data.storage().nbytes() <= data.nbytes();
    if (is_alone && targets.adopt(index, data.view(found_.dtype).reshape(found_.sizes))) return;
    begin(targets);
    targets.fill(index, 0, data);
  });
  if (is_filled) end(window, digest);
}

// Throws unless the reply has a digest with which its bytes can be verified.
void ReadRequest::expect_digest(const std::optional<std::uint64_t>& digest) const {
  if (!digest && (needs_digest_ || !found_.has_kept)) {
    throw std::invalid_argument("key '" + key + "': the reply has no digest");
  }
}

void ReadRequest::take_part(Window& window, std::uint32_t part, const at::Tensor& data,
                            std::optional<std::uint64_t> expected) {
  const std::uint64_t begin = part * kPart;
  if (data.nbytes() != size_of_part(part)) {
    throw std::invalid_argument("key '" + key + "': a part has " + std::to_string(data.nbytes()) + " bytes, and not " +
                                std::to_string(size_of_part(part)));
  }
  expect_digest(expected);
  const std::uint64_t digest =
      digest_ == nullptr ? digest_of(data) : digest_->add(begin, data.const_data_ptr(), data.nbytes());
  if (expected) expect_received(key, digest, *expected);
  if (!fill([&](api::Targets& targets) { targets.fill(index, begin, data); })) return;
  if (left_.fetch_sub(1) == 1) end_with_parts(window);
}

// Ends the request: all of its parts were received.
void ReadRequest::end_with_parts(Window& window) {
  if (digest_ == nullptr) return end(window, 0);
  if (found_.has_kept && digest_->value(found_.seed) != found_.kept) {
    if (!needs_digest_) return read_again(window);
    throw differs(key, "its " + std::to_string(found_.nbytes) + " bytes on the disk are not those that were written");
  }
  end(window, digest_->value());
}

// Reads the key once more: the bytes received are not those that were written, and the service can tell where they have
// changed. A second read could return a later tensor, so the request fails if the caller has used the key since.
void ReadRequest::read_again(Window& window) {
  RequestPtr second;
  fill([&](api::Targets&) { second = std::make_shared<ReadRequest>(fills_, index, true); });
  if (second == nullptr || window.replace(shared_from_this(), second) || window.is_done(*this)) return;
  throw differs(key, "its " + std::to_string(found_.nbytes) +
                         " bytes have changed on the disk or on the way; read it once more to learn which");
}

std::uint64_t ReadRequest::size_of_part(std::uint32_t part) const { return part_length(found_.nbytes, part); }

}  // namespace rpc_ext::store::client
