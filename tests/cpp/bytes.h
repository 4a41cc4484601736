// Test data for files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

using Bytes = std::vector<std::uint8_t>;

// Return bytes that count up from `seed`.
inline Bytes numbered(std::size_t size, unsigned seed) {
  Bytes bytes(size);
  std::iota(bytes.begin(), bytes.end(), static_cast<std::uint8_t>(seed));
  return bytes;
}
