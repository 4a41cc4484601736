// HMAC-SHA256 with the test vectors of RFC 4231, AES-256-GMAC with test vectors of NIST, and keys that threads share.
#include <atomic>
#include <string>

#include <doctest/doctest.h>

#include "../together.h"
#include "hex.h"
#include "seal/crypto.h"

using rpc_ext::Digest;
using rpc_ext::GmacKey;
using rpc_ext::HmacKey;
using rpc_ext::Nonce;
using rpc_ext::same;
using rpc_ext::test::hex;
using rpc_ext::test::unhex;

namespace {

std::string_view view(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

struct Example {
  std::string key;
  std::string data;
  const char* mac;
};

std::string counted(char first, char last) {
  std::string bytes;
  for (char byte = first; byte <= last; byte++) bytes += byte;
  return bytes;
}

const Example examples[] = {
    // from section 4, without 4.6, which tests truncated codes
    {std::string(20, '\x0b'), "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
    {"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
    {std::string(20, '\xaa'), std::string(50, '\xdd'),
     "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
    {counted(1, 25), std::string(50, '\xcd'), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
    {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
     "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
    {std::string(131, '\xaa'),
     "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed "
     "before being used by the HMAC algorithm.",
     "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
};

}  // namespace

TEST_SUITE_BEGIN("crypto");

TEST_CASE("HMAC-SHA256 gives the codes of RFC 4231") {
  for (const Example& example : examples) CHECK(hex(HmacKey(example.key).of({example.data})) == example.mac);
}

TEST_CASE("an HMAC does not depend on how the data is divided") {
  for (const Example& example : examples) {
    const HmacKey key(example.key);
    const std::string_view data = example.data;
    for (std::size_t at = 0; at <= data.size(); at++) {
      CHECK(hex(key.of({data.substr(0, at), "", data.substr(at)})) == example.mac);
    }
  }
}

TEST_CASE("same() returns true only for equal bytes") {
  const Digest digest = HmacKey("key").of({"data"});
  std::string bytes(view(digest));
  CHECK(same(view(digest), bytes));
  for (char& byte : bytes) {
    for (int bit = 0; bit < 8; bit++) {
      byte = static_cast<char>(byte ^ (1 << bit));
      CHECK_FALSE(same(view(digest), bytes));
      byte = static_cast<char>(byte ^ (1 << bit));
    }
  }
  CHECK_FALSE(same(view(digest), ""));
  CHECK_FALSE(same(view(digest), bytes.substr(1)));
  CHECK_FALSE(same(view(digest), bytes + '\0'));
}

// NIST's test vectors for GCM: test case 13 of the specification, and one without a plaintext from
// gcmEncryptExtIV256.rsp.
TEST_CASE("GMAC gives NIST's tags for any division of the data") {
  GmacKey::Message nothing(GmacKey(Digest{}), Nonce{});
  CHECK(hex(nothing.tag()) == "530f8afbc74536b9a963b4f1c4cb738b");

  const GmacKey key(unhex<32>("78dc4e0aaf52d935c3c01eea57428f00ca1fd475f5da86a49c8dd73d68c8e223"));
  const auto nonce = unhex<12>("d79cf22d504cc793c3fb6c8a");
  const auto data = unhex<16>("b96baa8c1c75a671bfb2d08d06be5f36");
  for (std::size_t at = 0; at <= data.size(); at++) {
    GmacKey::Message message(key, nonce);
    message.add(data.data(), at);
    message.add(nullptr, 0);
    message.add(data.data() + at, data.size() - at);
    CHECK(hex(message.tag()) == "3e5d486aa2e30b22e040b85723a06e76");
  }
}

TEST_CASE("many threads can share a key and alternate between keys") {
  const HmacKey keys[] = {HmacKey(examples[0].key), HmacKey(examples[1].key)};
  const GmacKey zero(Digest{});
  std::atomic<int> mismatches{0};
  native_tests::together(8, [&](int) {
    for (int i = 0; i < 500; i++) {
      const Example& example = examples[i % 2];
      mismatches += hex(keys[i % 2].of({example.data})) != example.mac;
      GmacKey::Message nothing(zero, Nonce{});
      mismatches += hex(nothing.tag()) != "530f8afbc74536b9a963b4f1c4cb738b";
    }
  });
  CHECK(mismatches == 0);
}

TEST_SUITE_END();
