// Seals: their format, and the messages that a receiver refuses.
#include <array>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../together.h"
#include "hex.h"
#include "seal/seal.h"

using rpc_ext::Admitted;
using rpc_ext::MessageDirection;
using rpc_ext::MessagePart;
using rpc_ext::Parts;
using rpc_ext::Refused;
using rpc_ext::Sealer;
using rpc_ext::test::hex;

namespace {

constexpr int world_size = 3;
const std::string session_key = [] {
  std::string key(32, '\0');
  std::iota(key.begin(), key.end(), '\0');
  return key;
}();
const std::string changed = "its signature is wrong";
const std::string other_message = "it was signed as another message";

// A message that owns its memory.
struct Message {
  std::vector<std::string> payloads{"type", "number", "payload", ""};
  std::vector<std::string> tensors{"abcd", "efg"};
  std::vector<std::int32_t> sources{-1, -1};
  std::vector<std::int32_t> targets{-1, -1};

  struct View {
    std::vector<MessagePart> payloads, tensors;
    Parts parts() const { return {payloads, tensors}; }
  };
  View view() const {
    View view;
    for (const auto& payload : payloads) view.payloads.push_back({payload.size(), -1, -1, payload.data()});
    for (std::size_t i = 0; i < tensors.size(); i++) {
      view.tensors.push_back({tensors[i].size(), sources[i], targets[i], tensors[i].data()});
    }
    return view;
  }
};

std::string sealed(Sealer& by, const Message& message = {}, bool with_contents = false, int receiver = 2,
                   MessageDirection direction = MessageDirection::request) {
  const auto view = message.view();
  return by.seal(direction, receiver, 7, view.parts(), with_contents);
}

// The reason why a worker refuses a message ("": it accepts the message), and the sender that the message is counted
// for.
struct Verdict {
  std::string reason;
  int sender = -2;
};

Verdict opened(Sealer& by, const std::string& seal, const Message& announced = {}, const Message& received = {}) {
  try {
    const auto first = announced.view();
    const Admitted admitted = by.admit(seal, first.parts());
    by.expect_new(admitted);
    const auto second = received.view();
    by.check(admitted, second.parts());
    return {"", admitted.sender};
  } catch (const Refused& refused) {
    return {refused.reason, refused.sender};
  }
}

struct Pair {
  Sealer one{session_key, 1, world_size};
  Sealer two{session_key, 2, world_size};
};

}  // namespace

TEST_SUITE_BEGIN("seal");

TEST_CASE("a seal has the documented bytes") {
  Pair pair;
  Message message;
  message.targets[1] = 0;
  CHECK(hex(sealed(pair.one, message)) ==
        "cf525043020100000100000002000000010000000000000007000000000000009181a4bf0b829521"
        "c4709e2a7be485e5e12ea874f71b3d11734cfafb53140e2cfbcc6e0dccd41b716a2f625dbab15d9c");
  message.targets[1] = -1;
  CHECK(hex(sealed(pair.one, message, true)) ==
        "cf525043020101000100000002000000020000000000000007000000000000003d2fd5ca3d2ec8aa"
        "e53808017a1b22a5f3cb81887c5bcca14b8117d6372e8c8f7a962243551b54c687f9a9a64e3f81d0");
  message.targets[1] = 0;
  CHECK(hex(sealed(pair.one, message, false, 2, MessageDirection::reply)) ==
        "cf525043020200000100000002000000010000000000000007000000000000007a1738635c315b32"
        "e72ea770f065fb4823ed4db6296da840075a2a0e95a1c5fe3dedf7b66f0c22b9753f8900d3db2bc0");
}

TEST_CASE("a message is accepted once") {
  Pair pair;
  const std::string seal = sealed(pair.one);
  CHECK(opened(pair.two, seal).sender == 1);
  const Verdict again = opened(pair.two, seal);
  CHECK(again.reason == "it was received before");
  CHECK(again.sender == 1);
}

TEST_CASE("messages are accepted in any order") {
  Pair pair;
  const std::string first = sealed(pair.one);
  const std::string second = sealed(pair.one);
  CHECK(opened(pair.two, second).reason.empty());
  CHECK(opened(pair.two, first).reason.empty());
}

TEST_CASE("a seal of the wrong length is refused without a counter") {
  Pair pair;
  const std::string seal = sealed(pair.one);
  for (std::size_t length = 0; length < seal.size(); length++) {
    CHECK(opened(pair.two, seal.substr(0, length)).reason == "it is not signed");
  }
  CHECK(opened(pair.two, seal + '\0').reason == "it is not signed");
  CHECK(opened(pair.two, seal).reason.empty());
}

TEST_CASE("a seal with a changed bit is refused without a counter") {
  Pair pair;
  const std::string seal = sealed(pair.one);
  for (std::size_t i = 0; i < 8 * seal.size(); i++) {
    std::string other = seal;
    other[i / 8] = static_cast<char>(other[i / 8] ^ (1 << (i % 8)));
    CHECK(opened(pair.two, other).reason == (i < 32 ? "it is not signed" : changed));
  }
  CHECK(opened(pair.two, seal).reason.empty());
}

TEST_CASE("a refused message is counted for the worker in its seal") {
  Pair pair;
  std::string seal = sealed(pair.one);
  seal.back() ^= 1;
  CHECK(opened(pair.two, seal).sender == 1);
  seal[8] = 0;
  CHECK(opened(pair.two, seal).sender == 0);
  seal[8] = world_size;
  CHECK(opened(pair.two, seal).sender == -1);
  seal[0] = 0;
  CHECK(opened(pair.two, seal).sender == -1);
}

TEST_CASE("a message that was signed with another key is refused") {
  Sealer with_other_key(std::string(32, 'x'), 1, world_size);
  Sealer two(session_key, 2, world_size);
  CHECK(opened(two, sealed(with_other_key)).reason == changed);
}

TEST_CASE("a message is accepted by its receiver only") {
  Pair pair;
  Sealer zero(session_key, 0, world_size);
  const std::string seal = sealed(pair.one);
  CHECK(opened(zero, seal).reason == other_message);
  CHECK(opened(pair.one, seal).reason == other_message);
  CHECK(opened(pair.two, seal).reason.empty());
}

TEST_CASE("a message from a sender outside the session is refused") {
  Sealer two(session_key, 2, world_size);
  Sealer outsider(session_key, 7, 8);
  const Verdict verdict = opened(two, sealed(outsider));
  CHECK(verdict.reason == other_message);
  CHECK(verdict.sender == -1);
}

TEST_CASE("requests and replies have separate counters, and the seal determines the direction") {
  Pair pair;
  const auto view = Message{}.view();
  const std::string request = sealed(pair.one);
  const std::string reply = sealed(pair.one, {}, false, 2, MessageDirection::reply);
  const Admitted first = pair.two.admit(request, view.parts());
  const Admitted second = pair.two.admit(reply, view.parts());
  CHECK(first.direction == MessageDirection::request);
  CHECK(second.direction == MessageDirection::reply);
  CHECK(first.counter == 1);
  CHECK(second.counter == 1);
  CHECK(second.number == 7);
  pair.two.expect_new(first);
  pair.two.expect_new(second);
}

TEST_CASE("a message that differs from its sealed header is not read") {
  Pair pair;
  const auto refused = [&](auto change) {
    Message announced;
    change(announced);
    const auto view = announced.view();
    try {
      pair.two.admit(sealed(pair.one), view.parts());
      return std::string();
    } catch (const Refused& refused) {
      return refused.reason;
    }
  };
  CHECK(refused([](Message&) {}).empty());
  CHECK(refused([](Message& m) { m.payloads[2] += 'x'; }) == changed);
  CHECK(refused([](Message& m) { m.payloads.pop_back(); }) == changed);
  CHECK(refused([](Message& m) { m.payloads.emplace_back(); }) == changed);
  CHECK(refused([](Message& m) { m.tensors[0].resize(1 << 22); }) == changed);
  CHECK(refused([](Message& m) { std::swap(m.tensors[0], m.tensors[1]); }) == changed);
  CHECK(refused([](Message& m) { m.tensors.pop_back(); }) == changed);
  CHECK(refused([](Message& m) { m.targets[0] = 0; }) == changed);
  CHECK(refused([](Message& m) { m.sources[0] = 0; }) == changed);
}

TEST_CASE("a message with a changed bit in a payload is refused") {
  Pair pair;
  for (std::size_t p = 0; p < 3; p++) {
    for (std::size_t i = 0; i < 8 * Message{}.payloads[p].size(); i++) {
      Message received;
      received.payloads[p][i / 8] = static_cast<char>(received.payloads[p][i / 8] ^ (1 << (i % 8)));
      CHECK(opened(pair.two, sealed(pair.one), {}, received).reason == changed);
    }
  }
}

TEST_CASE("tensor contents are checked if the seal includes them") {
  Pair pair;
  Message received;
  received.tensors[1] = "efh";
  CHECK(opened(pair.two, sealed(pair.one, {}, false), {}, received).reason.empty());
  CHECK(opened(pair.two, sealed(pair.one, {}, true), {}, {}).reason.empty());
  CHECK(opened(pair.two, sealed(pair.one, {}, true), {}, received).reason == changed);
}

TEST_CASE("each message is accepted once among many threads") {
  constexpr int threads = 8;
  constexpr int count = 200;
  Pair pair;
  std::vector<std::string> seals(threads * count);
  native_tests::together(threads, [&](int t) {
    for (int i = 0; i < count; i++) seals[static_cast<std::size_t>(t * count + i)] = sealed(pair.one);
  });
  std::atomic<int> accepted{0};
  native_tests::together(threads, [&](int) {
    for (const std::string& seal : seals) accepted += opened(pair.two, seal).reason.empty();
  });
  CHECK(accepted == threads * count);
}

TEST_CASE("seal() throws if the receiver does not exist") {
  Pair pair;
  CHECK_THROWS_AS(sealed(pair.one, {}, false, world_size), std::out_of_range);
  CHECK_THROWS_AS(sealed(pair.one, {}, false, -1), std::out_of_range);
  CHECK_THROWS_AS(Sealer(session_key, 0, Sealer::most_workers + 1), std::invalid_argument);
}

TEST_CASE("no mutated message is accepted") {
  const char* const soak = std::getenv("CUDAFUTURE_SOAK");
  const int count = soak && *soak == '1' ? 100'000 : 10'000;
  std::mt19937 random(7);
  const auto below = [&](std::size_t end) { return std::uniform_int_distribution<std::size_t>(0, end - 1)(random); };
  const auto mutate = [&](std::string& bytes) {
    switch (bytes.empty() ? 2 : below(4)) {
      case 0:
        bytes[below(bytes.size())] ^= static_cast<char>(1 + below(255));
        break;
      case 1:
        bytes.resize(below(bytes.size()));
        break;
      case 2:
        bytes.append(1 + below(100), static_cast<char>(below(256)));
        break;
      default:
        bytes.insert(below(bytes.size()), 1, static_cast<char>(below(256)));
    }
  };
  Pair pair;
  const Message original;
  for (int i = 0; i < count; i++) {
    std::string seal = sealed(pair.one, original, true);
    Message announced = original;
    Message received = original;
    switch (below(3)) {
      case 0:
        mutate(seal);
        break;
      case 1:
        mutate(received.payloads[below(4)]);
        announced = received;
        break;
      default:
        mutate(received.tensors[below(2)]);
        if (below(2) == 0) announced = received;
    }
    if (received.tensors != original.tensors && announced.tensors == original.tensors) {
      // TensorPipe reads exactly the announced number of bytes.
      for (std::size_t t = 0; t < 2; t++) received.tensors[t].resize(original.tensors[t].size());
      if (received.tensors == original.tensors) continue;
    }
    const bool accepted = opened(pair.two, seal, announced, received).reason.empty();
    if (accepted) FAIL_CHECK("mutation " << i << " was accepted");
  }
}

TEST_SUITE_END();
