// Pages of the page cache, and rounding to pages or other units.
#pragma once

#include <cstdint>

namespace cudafuture::io {

constexpr std::uint64_t kPage = 4096;

constexpr std::uint64_t floor_to(std::uint64_t value, std::uint64_t unit) { return value - value % unit; }
constexpr std::uint64_t ceil_to(std::uint64_t value, std::uint64_t unit) { return floor_to(value + unit - 1, unit); }

}  // namespace cudafuture::io
