// Conversion between bytes and hexadecimal digits, the format of published test vectors.
#pragma once

#include <array>
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

template <std::size_t size>
std::array<std::uint8_t, size> unhex(const std::string& text) {
  std::array<std::uint8_t, size> bytes{};
  for (std::size_t i = 0; i < size; i++)
    bytes[i] = static_cast<std::uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return bytes;
}

}  // namespace rpc_ext::test
