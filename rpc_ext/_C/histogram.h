// Durations in logarithmic buckets, each an eighth of a power of two wide. The caller locks it.
//
// Buckets that are as wide as their durations are long are those of Tene, "HdrHistogram".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace rpc_ext {

class Histogram {
 public:
  void add(std::int64_t ns) noexcept;
  std::uint64_t total() const noexcept { return total_; }

  // Returns the duration, in seconds, that the share `q` of all does not exceed; nan: there is none.
  double quantile(double q) const noexcept;

  // Returns the upper end in seconds, and the count, of each bucket that holds any, in order.
  std::vector<std::pair<double, std::uint64_t>> buckets() const;

 private:
  static constexpr unsigned kSteps = 8;  // buckets in each power of two

  static double upper_end(std::size_t bucket) noexcept;  // seconds

  std::array<std::uint64_t, 65 * kSteps> counts_{};
  std::uint64_t total_ = 0;
};

}  // namespace rpc_ext
