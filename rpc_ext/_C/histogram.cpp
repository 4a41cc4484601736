#include "histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace rpc_ext {

void Histogram::add(std::int64_t ns) noexcept {
  const auto value = static_cast<std::uint64_t>(std::max<std::int64_t>(ns, kSteps));
  const auto bits = static_cast<unsigned>(std::bit_width(value));
  ++counts_[bits * kSteps + ((value >> (bits - 4)) & (kSteps - 1))];
  ++total_;
}

double Histogram::quantile(double q) const noexcept {
  auto wanted = std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(q * static_cast<double>(total_))));
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    wanted -= static_cast<std::int64_t>(counts_[i]);
    if (wanted <= 0) return upper_end(i);
  }
  return std::numeric_limits<double>::quiet_NaN();
}

std::vector<std::pair<double, std::uint64_t>> Histogram::buckets() const {
  std::vector<std::pair<double, std::uint64_t>> found;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    if (counts_[i] != 0) found.emplace_back(upper_end(i), counts_[i]);
  }
  return found;
}

double Histogram::upper_end(std::size_t bucket) noexcept {
  const std::size_t bits = bucket / kSteps, step = bucket % kSteps;
  return static_cast<double>(std::uint64_t{kSteps + step + 1} << (bits - 4)) * 1e-9;
}

}  // namespace rpc_ext
