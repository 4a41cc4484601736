// Bytes as hexadecimal digits, which is how other people's examples come.
#pragma once

#include <cstdint>
#include <string>

namespace rpc_ext::test {

template <class Bytes>
std::string hex(const Bytes& bytes) {
  constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const auto byte : bytes) {
    const auto value = static_cast<std::uint8_t>(byte);
    text += digits[value >> 4];
    text += digits[value & 15];
  }
  return text;
}

}  // namespace rpc_ext::test
