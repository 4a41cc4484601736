// Frames: their bytes, and what is refused.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <numeric>
#include <string>

#include <doctest/doctest.h>

#include "../together.h"
#include "hex.h"
#include "seal.h"

using rpc_ext::Bytes;
using rpc_ext::Refused;
using rpc_ext::Sealer;
using rpc_ext::test::hex;

namespace {

constexpr int call = 0x102;
constexpr int answer = 0x203;
constexpr int world_size = 3;
const std::string session_key = [] {
  std::string key(32, '\0');
  std::iota(key.begin(), key.end(), '\0');
  return key;
}();
const std::string_view text = "payload";
const Bytes payload(text.begin(), text.end());
using Tensors = std::vector<at::Tensor>;

// What a worker says of a message; "" where it takes it.
struct Verdict {
  std::string reason;
  int sender = -2;
};

Verdict opened(Sealer& by, const Bytes& frame, const Tensors& tensors = {}, int type = call) {
  try {
    by.open_request(type, frame, tensors);
    return {};
  } catch (const Refused& refused) {
    return {refused.reason, refused.sender};
  }
}

Verdict opened_reply(const Sealer& by, int sender, std::uint64_t counter, const Bytes& frame, int type = answer) {
  try {
    by.open_reply(sender, counter, type, frame, {});
    return {};
  } catch (const Refused& refused) {
    return {refused.reason, refused.sender};
  }
}

// A worker and its peer, of one session.
struct Pair {
  Sealer one{session_key, 1, world_size};
  Sealer two{session_key, 2, world_size};

  Bytes request(const Tensors& tensors = {}, int type = call) {
    return one.seal_request(2, type, payload, tensors).frame;
  }
};

}  // namespace

TEST_SUITE_BEGIN("seal");

TEST_CASE("a frame has the bytes that are documented") {
  Pair pair;
  const std::string head = "cf52504301010201010000000200000001";
  const std::string counted = head + "00000000000000";
  CHECK(hex(pair.request()) ==
        counted + "dea4c9b84b37a89c31fced136701012c3d10b9d891a2b65cf79b26bb4a36302b" + hex(payload));
}

TEST_CASE("the description of the tensors is signed") {
  Pair pair;
  const Tensors tensors{at::zeros({3, 4}), at::zeros({}, at::kLong)};
  const std::string frame = hex(pair.request(tensors));
  CHECK(frame.substr(2 * 24, 64) == "8897e79a1cf79a59accfa93ecc6988e91cea12e07029d0551cf34797dca6804d");
}

TEST_CASE("a request is taken once") {
  Pair pair;
  const Bytes frame = pair.request();
  const Sealer::Opened found = pair.two.open_request(call, frame, {});
  CHECK(found.sender == 1);
  CHECK(found.counter == 1);
  const Verdict again = opened(pair.two, frame);
  CHECK(again.reason == "it was received before");
  CHECK(again.sender == 1);
}

TEST_CASE("requests are taken in any order") {
  Pair pair;
  const Bytes first = pair.request();
  const Bytes second = pair.request();
  CHECK(opened(pair.two, second).reason.empty());
  CHECK(opened(pair.two, first).reason.empty());
}

TEST_CASE("a frame is refused whose bytes are not all there, and it uses up no counter") {
  Pair pair;
  const Bytes frame = pair.request();
  for (std::size_t length = 0; length < frame.size(); length++) {
    CHECK_FALSE(
        opened(pair.two, Bytes(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(length))).reason.empty());
  }
  CHECK(opened(pair.two, frame).reason.empty());
}

TEST_CASE("a frame is refused one bit of which was changed, and it uses up no counter") {
  Pair pair;
  const Bytes frame = pair.request();
  for (std::size_t i = 0; i < 8 * frame.size(); i++) {
    Bytes changed = frame;
    changed[i / 8] = static_cast<char>(changed[i / 8] ^ (1 << (i % 8)));
    const Verdict verdict = opened(pair.two, changed);
    CHECK(verdict.reason == (i < 32 ? "it is not signed" : "its signature is wrong"));
  }
  CHECK(opened(pair.two, frame).reason.empty());
}

TEST_CASE("it is counted for whom the frame names, where there is such a worker") {
  Pair pair;
  Bytes frame = pair.request();
  frame.back() ^= 1;
  CHECK(opened(pair.two, frame).sender == 1);
  frame[8] = 0;
  CHECK(opened(pair.two, frame).sender == 0);
  frame[8] = world_size;
  CHECK(opened(pair.two, frame).sender == -1);
  frame[0] = 0;
  CHECK(opened(pair.two, frame).sender == -1);
}

TEST_CASE("what was signed under another key is refused") {
  Sealer stranger(std::string(32, 'x'), 1, world_size);
  Sealer two(session_key, 2, world_size);
  CHECK(opened(two, stranger.seal_request(2, call, payload, {}).frame).reason == "its signature is wrong");
}

TEST_CASE("a frame is taken by its receiver only") {
  Pair pair;
  Sealer zero(session_key, 0, world_size);
  const Bytes frame = pair.request();
  CHECK(opened(zero, frame).reason == "it was signed as another message");
  CHECK(opened(pair.one, frame).reason == "it was signed as another message");
  CHECK(opened(pair.two, frame).reason.empty());
}

TEST_CASE("a sender from outside of the session is refused") {
  Sealer two(session_key, 2, world_size);
  Sealer outsider(session_key, 7, 8);
  const Verdict verdict = opened(two, outsider.seal_request(2, call, payload, {}).frame);
  CHECK(verdict.reason == "it was signed as another message");
  CHECK(verdict.sender == -1);
}

TEST_CASE("a frame is taken as the message that it was signed as") {
  Pair pair;
  const Bytes frame = pair.request();
  CHECK(opened(pair.two, frame, {}, 0x100).reason == "it was signed as another message");
  CHECK(opened(pair.two, frame, {}, answer).reason == "it was signed as another message");
  CHECK(opened(pair.two, frame).reason.empty());
}

TEST_CASE("a reply is no request, and a request no reply") {
  Pair pair;
  const auto [frame, counter] = pair.one.seal_request(2, call, payload, {});
  CHECK(opened_reply(pair.one, 2, counter, frame, call).reason == "it was signed as another message");
  const Bytes request = pair.two.seal_request(1, call, payload, {}).frame;
  CHECK(opened_reply(pair.one, 2, counter, request, call).reason == "it was signed as another message");
  const Bytes reply = pair.two.seal_reply(1, counter, call, payload, {});
  CHECK(opened(pair.one, reply).reason == "it was signed as another message");
  CHECK(opened_reply(pair.one, 2, counter, reply, call).reason.empty());
}

TEST_CASE("a reply is taken for its own request, from whom it went to, as what it was signed as") {
  Pair pair;
  const Bytes reply = pair.two.seal_reply(1, 5, answer, payload, {});
  const std::string other = "it was signed as another message";
  CHECK(opened_reply(pair.one, 2, 5, reply).reason.empty());
  CHECK(opened_reply(pair.one, 2, 6, reply).reason == other);
  CHECK(opened_reply(pair.one, 0, 5, reply).reason == other);
  CHECK(opened_reply(pair.one, 2, 5, reply, call).reason == other);
  CHECK(opened_reply(Sealer(session_key, 0, world_size), 2, 5, reply).reason == other);
  CHECK(opened_reply(Sealer(std::string(32, 'x'), 1, world_size), 2, 5, reply).reason == "its signature is wrong");
  CHECK(opened_reply(pair.one, 2, 5, {}).reason == "it is not signed");
  CHECK(opened_reply(pair.one, 2, 5, {}).sender == 2);  // whoever was asked, whatever it says
}

TEST_CASE("other tensors than those that were signed are refused") {
  Pair pair;
  const at::Tensor signed_one = at::zeros({2, 3});
  const Bytes frame = pair.request({signed_one});
  const Tensors others[] = {
      {},
      {signed_one, signed_one},
      {at::zeros({3, 2})},
      {at::zeros({6})},
      {at::zeros({2, 3}, at::kInt)},
      {at::zeros({2, 3}, at::TensorOptions().device(at::kMeta))},
      {at::Tensor()},
  };
  for (const Tensors& tensors : others) CHECK(opened(pair.two, frame, tensors).reason == "its signature is wrong");
  CHECK(opened(pair.two, frame, {at::ones({2, 3})}).reason.empty());  // what they contain is not signed
}

TEST_CASE("a tensor that reaches beyond its memory is refused") {
  Pair pair;
  const auto reaching = [](at::IntArrayRef strides, std::int64_t offset) {
    at::Tensor tensor = at::zeros({2, 3});
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides({2, 3}, strides);
    return tensor;
  };
  const auto verdict = [&](const at::Tensor& tensor) {
    return opened(pair.two, pair.request({at::zeros({2, 3})}), {tensor}).reason;
  };
  CHECK(verdict(reaching({3, 1}, 0)).empty());
  CHECK(verdict(reaching({0, 0}, 5)).empty());
  CHECK(verdict(reaching({1, 2}, 0)).empty());
  const std::string beyond = "a tensor reaches beyond its memory";
  CHECK(verdict(reaching({3, 1}, 1)) == beyond);
  CHECK(verdict(reaching({4, 1}, 0)) == beyond);
  CHECK(verdict(reaching({3, 2}, 0)) == beyond);
  CHECK(verdict(reaching({INT64_MAX, 1}, 0)) == beyond);
  CHECK(verdict(reaching({INT64_MAX, INT64_MAX}, 0)) == beyond);
  CHECK(opened(pair.two, pair.request({at::zeros({0, 3})}), {at::zeros({0, 3})}).reason.empty());
}

TEST_CASE("each request of many threads has a counter of its own, and is taken by one") {
  constexpr int threads = 8;
  constexpr int count = 200;
  Pair pair;
  std::vector<Bytes> frames(threads * count);
  native_tests::together(threads, [&](int t) {
    for (int i = 0; i < count; i++) frames[static_cast<std::size_t>(t * count + i)] = pair.request();
  });
  std::atomic<int> taken{0};
  native_tests::together(threads, [&](int) {
    for (const Bytes& frame : frames) taken += opened(pair.two, frame).reason.empty();
  });
  CHECK(taken == threads * count);
  CHECK(pair.one.seal_request(2, call, payload, {}).counter == threads * count + 1);
}

TEST_CASE("counters are of a sender and a receiver") {
  Pair pair;
  CHECK(pair.one.seal_request(2, call, payload, {}).counter == 1);
  CHECK(pair.one.seal_request(0, call, payload, {}).counter == 1);
  CHECK(pair.one.seal_request(2, call, payload, {}).counter == 2);
  CHECK_THROWS_AS(pair.one.seal_request(world_size, call, payload, {}), std::out_of_range);
  CHECK_THROWS_AS(pair.one.seal_request(-1, call, payload, {}), std::out_of_range);
}

TEST_SUITE_END();
