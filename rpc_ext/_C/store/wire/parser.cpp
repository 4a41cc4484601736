#include "store/wire/parser.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace rpc_ext::store {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// The length of the UTF-8 sequence at the beginning of a text that is not empty; 0: it is not UTF-8.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const unsigned char second = byte(1);
  const bool is_overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool is_surrogate = first == 0xED && second >= 0xA0;
  const bool is_beyond = first == 0xF4 && second >= 0x90;
  return is_overlong || is_surrogate || is_beyond ? 0 : length;
}

std::string_view expect_utf8(std::string_view text, const char* name) {
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t length = sequence_length(rest);
    if (length == 0) refuse(std::string(name) + " is not UTF-8");
    rest.remove_prefix(length);
  }
  return text;
}

bool has_bytes(const std::vector<std::int64_t>& sizes, std::size_t item, std::uint64_t nbytes) {
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size < 0; })) return false;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return nbytes == 0;
  std::uint64_t product = item;
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(product, static_cast<std::uint64_t>(size), &product) || product > kMostBytes)
      return false;
  }
  return product == nbytes;
}

class WireReader {
 public:
  explicit WireReader(std::string_view body) : body_(body) {}

  template <class Number>
  Number number() {
    Number value;
    std::memcpy(&value, text(sizeof value).data(), sizeof value);
    return value;
  }

  std::string_view text(std::size_t length) {
    if (length > body_.size() - at_) {
      refuse("the message of " + std::to_string(body_.size()) + " bytes is cut off at " + std::to_string(at_));
    }
    const std::string_view found = body_.substr(at_, length);
    at_ += length;
    return found;
  }
  std::string_view short_text() { return text(number<std::uint16_t>()); }

  std::string key(std::size_t length) {
    const std::string_view key = expect_utf8(text(length), "a key");
    if (const auto fault = key_fault(key)) refuse(*fault);
    return std::string(key);
  }

  template <class Holder>
  void tensor(Holder& into) {
    const auto code = number<std::uint8_t>();
    const auto dimensions = number<std::uint8_t>();
    into.nbytes = number<std::uint64_t>();
    if (code >= dtypes().size() || dimensions > kMostDimensions || into.nbytes > kMostBytes) {
      refuse("dtype " + std::to_string(code) + ", " + std::to_string(dimensions) + " dimensions, " +
             std::to_string(into.nbytes) + " bytes: there is no such tensor");
    }
    into.dtype = dtypes()[code];
    into.sizes.resize(dimensions);
    for (std::int64_t& size : into.sizes) size = number<std::int64_t>();
    if (!has_bytes(into.sizes, c10::elementSize(into.dtype), into.nbytes)) {
      refuse(std::string("a tensor of ") + c10::toString(into.dtype) + " of that shape does not have " +
             std::to_string(into.nbytes) + " bytes");
    }
  }

  // Returns the digest of the bytes.
  template <class Holder>
  std::uint64_t place(std::uint32_t& part, Holder& into) {
    part = number<std::uint32_t>();
    into.at = number<std::uint32_t>();
    into.length = number<std::uint32_t>();
    return number<std::uint64_t>();
  }

  at::Tensor data(const std::vector<at::Tensor>& tensors) const {
    const std::string_view rest = body_.substr(at_);
    if (tensors.empty()) {
      if (rest.size() > kInline) refuse(std::to_string(rest.size()) + " bytes follow the entries");
      at::Tensor data = bytes_of(rest.size());
      if (!rest.empty()) std::memcpy(data.mutable_data_ptr(), rest.data(), rest.size());
      return data;
    }
    const at::Tensor& data = tensors.front();
    if (!rest.empty() || tensors.size() != 1 || !data.defined() || data.layout() != at::kStrided || !data.is_cpu()) {
      refuse("the data of a message are bytes at its end, or one dense tensor on the host");
    }
    if (data.scalar_type() != at::kByte || data.dim() != 1 || data.nbytes() > kPart) {
      refuse("the data of a message are up to " + std::to_string(kPart) + " bytes, not " +
             c10::toString(data.scalar_type()) + " " + c10::str(data.sizes()));
    }
    // The sender chooses where the tensor lies in its storage.
    const std::size_t size = data.nbytes(), stored = data.storage().nbytes();
    const std::int64_t offset = data.storage_offset();
    if (!data.is_contiguous() || offset < 0 || size > stored || static_cast<std::uint64_t>(offset) > stored - size) {
      refuse("the data of a message are " + std::to_string(size) + " bytes in a row at " + std::to_string(offset) +
             " of a storage of " + std::to_string(stored));
    }
    return data;
  }

 private:
  const std::string_view body_;
  std::size_t at_ = 0;
};

KeyEntry parse_operation(WireReader& reader) {
  KeyEntry entry;
  entry.sequence = reader.number<std::uint64_t>();
  entry.after = reader.number<std::uint64_t>();
  entry.expires = reader.number<double>();
  const auto length = reader.number<std::uint16_t>();
  if (entry.sequence == 0 || !std::isfinite(entry.expires)) {
    refuse("operation " + std::to_string(entry.sequence) + " that expires at " + std::to_string(entry.expires) +
           ": there is none");
  }
  entry.key = reader.key(length);
  return entry;
}

KeyEntry parse_put(WireReader& reader) {
  KeyEntry entry = parse_operation(reader);
  reader.tensor(entry);
  entry.digest = reader.place(entry.part, entry);
  if (entry.part >= parts_of(entry.nbytes) || entry.length != part_length(entry.nbytes, entry.part)) {
    refuse("key '" + entry.key + "': part " + std::to_string(entry.part) + " of " + std::to_string(entry.nbytes) +
           " bytes does not have " + std::to_string(entry.length));
  }
  return entry;
}

KeyEntry parse_entry(Verb verb, WireReader& reader) {
  if (verb == Verb::put) return parse_put(reader);
  KeyEntry entry;
  if (verb != Verb::fetch) {
    entry = parse_operation(reader);
    if (verb == Verb::get) entry.needs_digest = reader.number<std::uint8_t>() != 0;
    return entry;
  }
  entry.sequence = reader.number<std::uint64_t>();
  entry.part = reader.number<std::uint32_t>();
  return entry;
}

// The bytes of the entries lie one after the other in the data.
template <class Entries>
void expect_places(const Entries& entries, std::size_t available) {
  std::size_t free = 0;
  for (const auto& entry : entries) {
    if (entry.length == 0) continue;
    if (entry.at < free || entry.at % kLine != 0 || entry.at > available || entry.length > available - entry.at) {
      refuse(std::to_string(entry.length) + " bytes at " + std::to_string(entry.at) + " are not in the " +
             std::to_string(available) + " that came, or another's");
    }
    free = entry.at + entry.length;
  }
}

void expect_each_key_once(const std::vector<KeyEntry>& entries) {
  std::unordered_set<std::string_view> keys;
  for (const KeyEntry& entry : entries) {
    if (!keys.insert(entry.key).second) refuse("a request has each key once");
  }
}

Problem parse_problem(WireReader& reader) {
  Problem problem;
  const auto kind = reader.number<std::uint8_t>();
  if (kind < 1 || kind > static_cast<std::uint8_t>(Problem::Kind::other))
    refuse("no error has kind " + std::to_string(kind));
  problem.kind = static_cast<Problem::Kind>(kind);
  problem.code = reader.number<std::int32_t>();
  problem.offset = reader.number<std::uint64_t>();
  problem.wanted = reader.number<std::uint64_t>();
  problem.got = reader.number<std::uint64_t>();
  problem.message = reader.short_text();
  problem.path = reader.short_text();
  return problem;
}

struct RequestHead {
  std::uint8_t version, verb;
  std::string_view token;
  double sent;
  std::uint64_t oldest;
  std::uint16_t count;
  std::string_view service;
};

RequestHead parse_head(WireReader& reader) {
  RequestHead head;
  head.version = reader.number<std::uint8_t>();
  head.verb = reader.number<std::uint8_t>();
  head.token = reader.text(kToken);
  head.sent = reader.number<double>();
  head.oldest = reader.number<std::uint64_t>();
  head.count = reader.number<std::uint16_t>();
  head.service = expect_utf8(reader.text(reader.number<std::uint8_t>()), "the name of a service");
  return head;
}

}  // namespace

std::string_view service_of(std::string_view body) {
  WireReader reader(body);
  return parse_head(reader).service;
}

StoreRequest parse_request(std::string_view body, const std::vector<at::Tensor>& tensors) {
  WireReader reader(body);
  const RequestHead head = parse_head(reader);
  const bool is_verb = head.verb >= 1 && head.verb <= static_cast<std::uint8_t>(Verb::abandon);
  if (head.version != kVersion || !is_verb || head.count < 1 || head.count > kMostEntries) {
    refuse("version " + std::to_string(head.version) + ", verb " + std::to_string(head.verb) + ", " +
           std::to_string(head.count) + " entries: there is no such request");
  }
  if (!std::isfinite(head.sent)) refuse(std::to_string(head.sent) + " is not a time");
  StoreRequest request;
  request.verb = static_cast<Verb>(head.verb);
  request.token = head.token;
  request.sent = head.sent;
  request.oldest = head.oldest;
  request.service = head.service;
  request.entries.reserve(head.count);
  for (std::size_t i = 0; i < head.count; ++i) request.entries.push_back(parse_entry(request.verb, reader));
  request.data = reader.data(tensors);
  if (request.verb != Verb::fetch) expect_each_key_once(request.entries);
  if (request.verb != Verb::put) {
    if (request.data.nbytes() != 0) {
      refuse(std::to_string(request.data.nbytes()) + " bytes travel with a request that has none");
    }
    return request;
  }
  expect_places(request.entries, request.data.nbytes());
  for (const KeyEntry& entry : request.entries) {
    if (entry.is_part() && request.entries.size() > 1) refuse("a part of a tensor travels alone");
  }
  return request;
}

Answer parse_answer(Verb verb, std::size_t count, std::string_view body, const std::vector<at::Tensor>& tensors) {
  WireReader reader(body);
  const auto version = reader.number<std::uint8_t>();
  const auto found = reader.number<std::uint16_t>();
  const auto errors = reader.number<std::uint16_t>();
  if (version != kVersion || found != count || errors > count) {
    refuse("version " + std::to_string(version) + ", " + std::to_string(found) +
           " entries: this is no answer to a request of " + std::to_string(count));
  }
  Answer answer;
  std::vector<bool> has_error(count);
  for (std::size_t i = 0; i < errors; ++i) {
    const auto index = reader.number<std::uint16_t>();
    if (index >= count || has_error[index]) {
      refuse("an error of entry " + std::to_string(index) + " of " + std::to_string(count) + ", or a second one");
    }
    has_error[index] = true;
    answer.errors.emplace_back(index, parse_problem(reader));
  }
  if (verb == Verb::get || verb == Verb::fetch) {
    answer.entries.resize(count - errors);
    std::uint32_t part = 0;  // always 0
    for (Found& entry : answer.entries) {
      if (verb == Verb::get) reader.tensor(entry);
      const std::uint64_t digest = reader.place(part, entry);
      if (reader.number<std::uint8_t>() != 0) entry.digest = digest;
      if (verb != Verb::get) continue;
      entry.has_kept = reader.number<std::uint8_t>() != 0;
      entry.kept = reader.number<std::uint64_t>();
      entry.seed = reader.number<std::uint64_t>();
      if (entry.length != 0 && entry.length != part_length(entry.nbytes, 0)) {
        refuse("the first part of " + std::to_string(entry.nbytes) + " bytes does not have " +
               std::to_string(entry.length));
      }
      if (!entry.digest && !entry.has_kept) refuse("a tensor has no digest");
    }
  }
  answer.data = reader.data(tensors);
  if (answer.entries.empty() && answer.data.nbytes() != 0) {
    refuse(std::to_string(answer.data.nbytes()) + " bytes travel with an answer that has none");
  }
  expect_places(answer.entries, answer.data.nbytes());
  return answer;
}

}  // namespace rpc_ext::store
