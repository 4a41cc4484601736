// Messages between a store client and its service: the parser refuses a changed message, or returns entries that lie
// in its data.
#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "store/wire/parser.h"

namespace store = rpc_ext::store;
using store::Verb;

namespace {

constexpr int changed_messages = 20'000;

store::KeyEntry entry_of(std::uint64_t sequence, const std::string& key, std::uint32_t at) {
  store::KeyEntry entry;
  entry.sequence = sequence;
  entry.key = key;
  entry.dtype = c10::ScalarType::Float;
  entry.sizes = {2, 3};
  entry.nbytes = entry.length = 24;
  entry.at = at;
  return entry;
}

std::vector<char> request_of(Verb verb) {
  store::StoreRequest request;
  request.verb = verb;
  request.token.assign(store::kToken, 't');
  request.service = "store";
  request.entries = {entry_of(1, "first key", 0), entry_of(2, "second key", 64)};
  request.data = verb == Verb::put ? store::bytes_of(88) : store::no_data();
  return store::pack_request(request).body;
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

std::string_view text(const std::vector<char>& bytes) { return {bytes.data(), bytes.size()}; }

}  // namespace

TEST_SUITE_BEGIN("store parser");

TEST_CASE("a parsed request equals the packed one") {
  const store::StoreRequest request = store::parse_request(text(request_of(Verb::put)), {});
  CHECK(request.verb == Verb::put);
  CHECK(request.service == "store");
  REQUIRE(request.entries.size() == 2);
  CHECK(request.entries[1].key == "second key");
  CHECK(request.entries[1].sizes == std::vector<std::int64_t>{2, 3});
  CHECK(request.data.nbytes() == 88);
}

TEST_CASE("entries of a corrupted request lie in its data or throw") {
  std::mt19937 random(1);
  int parsed = 0;
  for (const Verb verb : {Verb::put, Verb::get, Verb::erase, Verb::fetch, Verb::abandon}) {
    const std::vector<char> whole = request_of(verb);
    for (int i = 0; i < changed_messages; ++i) {
      std::vector<char> bytes = whole;
      change(bytes, random);
      try {
        const store::StoreRequest request = store::parse_request(text(bytes), {});
        ++parsed;
        for (const store::KeyEntry& entry : request.entries) {
          if (entry.length != 0) CHECK(entry.at + std::uint64_t{entry.length} <= request.data.nbytes());
        }
      } catch (const std::invalid_argument&) {
      }
    }
  }
  CHECK(parsed > changed_messages / 10);
  CHECK(parsed < 5 * changed_messages);
}

TEST_CASE("entries of a corrupted answer lie in its data or throw") {
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
  for (int i = 0; i < changed_messages; ++i) {
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
  CHECK(parsed > changed_messages / 100);
  CHECK(parsed < changed_messages);
}

TEST_SUITE_END();
