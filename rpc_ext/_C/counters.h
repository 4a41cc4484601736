#pragma once

#include <cstdint>
#include <map>
#include <mutex>

namespace rpc_ext {

// Which of a sender's counters have been seen, exactly, in whatever order they come: ranges that grow together. A
// message that never came leaves a gap; of very many gaps the oldest are closed, and what would have filled them is
// refused.
class SeenCounters {
 public:
  // False where it was seen before, or is older than what is remembered.
  bool insert(std::uint64_t counter);

 private:
  static constexpr std::size_t most_ranges = 1 << 16;

  std::mutex mutex_;                                       // guards ranges_; a leaf
  std::map<std::uint64_t, std::uint64_t> ranges_{{0, 1}};  // first -> one past the last; counters begin at 1
};

}  // namespace rpc_ext
