// Messages between a store client and its service: the parser refuses a changed message, or returns entries that lie
// in its data.
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/accumulate.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "store/wire/parser.h"

namespace store = rpc_ext::store;
using store::Verb;

namespace {

int changed_messages() {
  const char* const soak = std::getenv("CUDAFUTURE_SOAK");
  return soak && *soak == '1' ? 200'000 : 20'000;
}

store::KeyEntry entry_of(std::uint64_t sequence, const std::string& key, std::uint32_t at) {
  store::KeyEntry entry;
  entry.sequence = sequence;
  entry.after = sequence - 1;
  entry.expires = 2.5;
  entry.key = key;
  entry.needs_digest = true;
  entry.dtype = c10::ScalarType::Float;
  entry.sizes = {2, 3};
  entry.nbytes = entry.length = 24;
  entry.at = at;
  entry.digest = 5;
  return entry;
}

// The last of three parts.
store::KeyEntry last_part(const std::string& key, std::uint32_t at) {
  store::KeyEntry entry = entry_of(3, key, at);
  entry.dtype = c10::ScalarType::Byte;
  entry.nbytes = 2 * store::kPart + 24;
  entry.sizes = {static_cast<std::int64_t>(entry.nbytes)};
  entry.part = 2;
  return entry;
}

store::Packed packed(Verb verb, std::vector<store::KeyEntry> entries, std::size_t size) {
  store::StoreRequest request;
  request.verb = verb;
  request.token.assign(store::kToken, 't');
  request.sent = 1.5;
  request.oldest = 4;
  request.service = "store";
  request.entries = std::move(entries);
  request.data = at::zeros({static_cast<std::int64_t>(size)}, at::kByte);
  return store::pack_request(request);
}

std::string_view text(const std::vector<char>& bytes) { return {bytes.data(), bytes.size()}; }

store::StoreRequest round_trip(Verb verb, std::vector<store::KeyEntry> entries, std::size_t size) {
  const store::Packed message = packed(verb, std::move(entries), size);
  return store::parse_request(text(message.body), message.tensors);
}

std::vector<char> request_of(Verb verb) {
  return packed(verb, {entry_of(1, "first key", 0), entry_of(2, "second key", 64)}, verb == Verb::put ? 88 : 0).body;
}

void change(std::vector<char>& bytes, std::mt19937& random) {
  for (auto left = random() % 3 + 1; left > 0 && !bytes.empty(); --left) {
    const auto at = bytes.begin() + static_cast<std::ptrdiff_t>(random() % bytes.size());
    switch (random() % 3) {
      case 0:
        *at = static_cast<char>(random());
        break;
      case 1:
        bytes.erase(at, bytes.end() - at > 7 ? at + 7 : bytes.end());
        break;
      default:
        bytes.insert(at, {'\xff', '\xff', '\xff', '\x7f', '\0', '\0', '\0', '\0'});
    }
  }
}

}  // namespace

TEST_SUITE_BEGIN("store parser");

TEST_CASE("a parsed request equals the packed one") {
  for (const Verb verb : {Verb::put, Verb::get, Verb::erase, Verb::fetch, Verb::abandon}) {
    const store::StoreRequest request = store::parse_request(text(request_of(verb)), {});
    CHECK(store::service_of(text(request_of(verb))) == "store");
    CHECK(request.verb == verb);
    CHECK(request.token == std::string(store::kToken, 't'));
    CHECK(request.sent == 1.5);
    CHECK(request.oldest == 4);
    CHECK(request.service == "store");
    REQUIRE(request.entries.size() == 2);
    const store::KeyEntry& entry = request.entries[1];
    CHECK(entry.sequence == 2);
    if (verb == Verb::fetch) continue;
    CHECK(entry.after == 1);
    CHECK(entry.expires == 2.5);
    CHECK(entry.key == "second key");
    CHECK(entry.needs_digest == (verb == Verb::get));
    if (verb != Verb::put) continue;
    CHECK((entry.dtype == c10::ScalarType::Float));
    CHECK(entry.sizes == std::vector<std::int64_t>{2, 3});
    CHECK(entry.at == 64);
    CHECK(entry.digest == 5);
    CHECK(request.data.nbytes() == 88);
  }
}

TEST_CASE("more than 16 KiB of data travel beside the message") {
  for (const std::size_t size : {store::kInline, store::kInline + 1}) {
    CHECK(packed(Verb::put, {entry_of(1, "a", 0)}, size).tensors.size() == (size > store::kInline ? 1 : 0));
    CHECK(round_trip(Verb::put, {entry_of(1, "a", 0)}, size).data.nbytes() == size);
  }
}

TEST_CASE("an empty tensor may be at any place") {
  store::KeyEntry empty = entry_of(2, "b", 7);
  empty.sizes = {0, 3};
  empty.nbytes = empty.length = 0;
  CHECK(round_trip(Verb::put, {entry_of(1, "a", 0), empty}, 24).entries[1].sizes == empty.sizes);
}

TEST_CASE("an entry that makes no sense is refused") {
  using Change = void (*)(store::KeyEntry&);
  const std::vector<std::pair<Change, const char*>> cases{
      {[](store::KeyEntry& e) { e.sizes = {-3, -2}; }, "does not have 24 bytes"},
      {[](store::KeyEntry& e) { e.sizes = {3, 3}; }, "does not have 24 bytes"},
      {[](store::KeyEntry& e) { e.sizes = {1L << 62, 1L << 62}; }, "does not have 24 bytes"},
      {[](store::KeyEntry& e) { e.sizes.assign(65, 1); }, "no such tensor"},
      {[](store::KeyEntry& e) { e.nbytes = store::kMostBytes + 1; }, "no such tensor"},
      {[](store::KeyEntry& e) { e.part = 1; }, "part 1 of 24 bytes"},
      {[](store::KeyEntry& e) { e.length = 23; }, "does not have 23"},
      {[](store::KeyEntry& e) { e.at = 8; }, "are not in"},
      {[](store::KeyEntry& e) { e.at = 64; }, "are not in"},
      {[](store::KeyEntry& e) { e.at = 0xFFFFFFC0; }, "are not in"},
      {[](store::KeyEntry& e) { e.sequence = 0; }, "there is none"},
      {[](store::KeyEntry& e) { e.expires = std::numeric_limits<double>::quiet_NaN(); }, "there is none"},
      {[](store::KeyEntry& e) { e.expires = std::numeric_limits<double>::infinity(); }, "there is none"},
      {[](store::KeyEntry& e) { e.key = ""; }, "a key has"},
      {[](store::KeyEntry& e) { e.key.assign(1001, 'k'); }, "a key has"},
      {[](store::KeyEntry& e) { e.key = std::string("a\0b", 3); }, "a key has no NUL"},
      {[](store::KeyEntry& e) { e.key = "\xed\xa0\x80"; }, "not UTF-8"},
  };
  for (const auto& [change_one, why] : cases) {
    store::KeyEntry entry = entry_of(7, "layer 3", 0);
    change_one(entry);
    CAPTURE(why);
    CHECK_THROWS_WITH_AS(round_trip(Verb::put, {entry}, 24), doctest::Contains(why), std::invalid_argument);
  }
}

TEST_CASE("entries that do not fit together are refused") {
  const auto refuses = [](const std::vector<store::KeyEntry>& entries, std::size_t size, const char* why) {
    CAPTURE(why);
    CHECK_THROWS_WITH_AS(round_trip(Verb::put, entries, size), doctest::Contains(why), std::invalid_argument);
  };
  refuses({entry_of(1, "a", 0), entry_of(2, "b", 0)}, 24, "or another's");
  refuses({entry_of(1, "a", 0), entry_of(2, "a", 64)}, 88, "each key once");
  refuses({entry_of(1, "a", 0), last_part("b", 64)}, 88, "travels alone");
  refuses({last_part("a", 0), entry_of(2, "b", 64)}, 88, "travels alone");
  refuses({last_part("a", 0)}, 23, "are not in");
  refuses({last_part("a", 0)}, store::kPart + 1, "up to 16777216 bytes");
  refuses({}, 0, "no such request");
  std::vector<store::KeyEntry> many;
  for (std::uint32_t i = 0; i <= store::kMostEntries; ++i) many.push_back(entry_of(i + 1, std::to_string(i), 64 * i));
  refuses(many, 64 * many.size(), "no such request");
  CHECK_THROWS_WITH_AS(round_trip(Verb::get, {entry_of(1, "a", 0)}, 24), doctest::Contains("24 bytes travel with"),
                       std::invalid_argument);
}

TEST_CASE("the data of a message are bytes on the host") {
  const std::vector<char> body = packed(Verb::put, {entry_of(1, "a", 0)}, 0).body;
  const at::Tensor bytes = at::zeros({24}, at::kByte);
  CHECK(store::parse_request(text(body), {bytes}).data.nbytes() == 24);
  const std::vector<std::vector<at::Tensor>> wrong{{at::zeros({24})},     {bytes.reshape({4, 6})}, {bytes.to_sparse()},
                                                   {bytes.to(at::kMeta)}, {bytes, bytes},          {at::Tensor()}};
  for (const auto& tensors : wrong) {
    CHECK_THROWS_WITH_AS(store::parse_request(text(body), tensors), doctest::Contains("the data of a message"),
                         std::invalid_argument);
  }
}

TEST_CASE("the data of a message lie in their storage") {
  const std::vector<char> request = packed(Verb::put, {entry_of(1, "a", 0)}, 0).body;
  store::Found found;
  found.length = 24;
  found.digest = 1;
  const std::vector<char> answer = store::pack_answer("", 1, {}, Verb::fetch, {found}, store::no_data()).body;
  // Returns 24 bytes of a storage of 32, as a sender describes them.
  const auto bytes_at = [](std::int64_t offset, std::int64_t stride, std::int64_t storage = 32) {
    at::Tensor tensor = at::zeros({storage}, at::kByte);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(c10::IntArrayRef{24}, c10::IntArrayRef{stride}, offset);
    return tensor;
  };
  const at::Tensor good = bytes_at(8, 1);
  CHECK(store::parse_request(text(request), {good}).data.const_data_ptr() == good.const_data_ptr());
  CHECK(store::parse_answer(Verb::fetch, 1, text(answer), {good}).data.const_data_ptr() == good.const_data_ptr());
  const auto most = std::numeric_limits<std::int64_t>::max();
  for (const at::Tensor& tensor : {bytes_at(9, 1), bytes_at(-1, 1), bytes_at(most, 1), bytes_at(-most, 1),
                                   bytes_at(0, 1, 23), bytes_at(0, 0), bytes_at(0, 2)}) {
    CAPTURE(tensor.storage_offset());
    CHECK_THROWS_WITH_AS(store::parse_request(text(request), {tensor}), doctest::Contains("of a storage of"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(store::parse_answer(Verb::fetch, 1, text(answer), {tensor}),
                         doctest::Contains("of a storage of"), std::invalid_argument);
  }
}

TEST_CASE("an answer to another request is refused") {
  store::Found found;
  found.length = 10;
  found.digest = 1;
  const std::vector<char> body = store::pack_answer("", 2, {}, Verb::fetch, {found, {}}, store::bytes_of(10)).body;
  CHECK(store::parse_answer(Verb::fetch, 2, text(body), {}).entries.size() == 2);
  CHECK_THROWS_AS(store::parse_answer(Verb::fetch, 3, text(body), {}), std::invalid_argument);
  CHECK_THROWS_AS(store::parse_answer(Verb::get, 2, text(body), {}), std::invalid_argument);
  CHECK_THROWS_AS(store::parse_answer(Verb::put, 2, text(body), {}), std::invalid_argument);
}

TEST_CASE("entries of a corrupted request lie in its data or throw") {
  const int count = changed_messages();
  std::mt19937 random(1);
  int parsed = 0;
  for (const Verb verb : {Verb::put, Verb::get, Verb::erase, Verb::fetch, Verb::abandon}) {
    const std::vector<char> whole = request_of(verb);
    for (int i = 0; i < count; ++i) {
      std::vector<char> bytes = whole;
      change(bytes, random);
      try {
        const store::StoreRequest request = store::parse_request(text(bytes), {});
        ++parsed;
        for (const store::KeyEntry& entry : request.entries) {
          if (entry.length != 0) CHECK(entry.at + std::uint64_t{entry.length} <= request.data.nbytes());
          if (verb == Verb::put)
            CHECK(c10::multiply_integers(entry.sizes) * c10::elementSize(entry.dtype) == entry.nbytes);
        }
      } catch (const std::invalid_argument&) {
      }
    }
  }
  CHECK(parsed > count / 10);
  CHECK(parsed < 5 * count);
}

TEST_CASE("entries of a corrupted answer lie in its data or throw") {
  const int count = changed_messages();
  std::mt19937 random(2);
  store::Found found;
  found.dtype = c10::ScalarType::Float;
  found.sizes = {2, 3};
  found.nbytes = found.length = 24;
  found.digest = 1;
  const store::Errors errors{{1, {.kind = store::Problem::Kind::timeout, .message = "late"}}};
  const std::vector<char> whole = store::pack_answer("", 2, errors, Verb::get, {found}, store::bytes_of(24)).body;
  CHECK(store::parse_answer(Verb::get, 2, text(whole), {}).errors.front().second.message == "late");
  int parsed = 0;
  for (int i = 0; i < count; ++i) {
    std::vector<char> bytes = whole;
    change(bytes, random);
    try {
      const store::Answer answer = store::parse_answer(Verb::get, 2, text(bytes), {});
      ++parsed;
      CHECK(answer.errors.size() + answer.entries.size() == 2);
      for (const store::Found& entry : answer.entries) {
        if (entry.length != 0) CHECK(entry.at + std::uint64_t{entry.length} <= answer.data.nbytes());
      }
    } catch (const std::invalid_argument&) {
    }
  }
  CHECK(parsed > count / 100);
  CHECK(parsed < count);
}

TEST_SUITE_END();
