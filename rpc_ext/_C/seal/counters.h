#pragma once

#include <cstdint>
#include <map>
#include <mutex>

namespace rpc_ext {

// Exact set of the counters seen from one sender, in any order of arrival: ranges that grow together. A message that
// never arrived leaves a gap. If there are very many gaps, the oldest are closed, and messages that would fill them are
// refused.
class SeenCounters {
 public:
  // False if the counter was seen before, or is older than all remembered gaps.
  bool insert(std::uint64_t counter);

 private:
  static constexpr std::size_t most_ranges = 1 << 16;

  std::mutex mutex_;                                       // guards ranges_; a leaf
  std::map<std::uint64_t, std::uint64_t> ranges_{{0, 1}};  // first -> one past the last; counters begin at 1
};

}  // namespace rpc_ext
