#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string_view>

namespace rpc_ext {

using Digest = std::array<std::uint8_t, 32>;

// HMAC-SHA256 (RFC 2104) under one key. The work is OpenSSL's libcrypto's, which is looked up when a key is made:
// Python's own hashlib has loaded one, and that one serves. Any thread may compute.
class HmacKey {
 public:
  // Throws std::runtime_error where there is no libcrypto.
  explicit HmacKey(std::string_view key);
  ~HmacKey();
  HmacKey(const HmacKey&) = delete;
  HmacKey& operator=(const HmacKey&) = delete;

  Digest of(std::initializer_list<std::string_view> parts) const;

  // In a time that does not depend on where they differ.
  static bool same(const Digest& a, std::string_view b) noexcept;

 private:
  void* keyed_;  // libcrypto's context after the key has gone in; copied for each message
};

}  // namespace rpc_ext
