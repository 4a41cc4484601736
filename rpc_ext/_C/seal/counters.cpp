#include "seal/counters.h"

#include <iterator>

namespace rpc_ext {

bool SeenCounters::insert(std::uint64_t counter) {
  if (counter == 0 || counter == UINT64_MAX) return false;
  const std::lock_guard lock(mutex_);
  const auto after = ranges_.upper_bound(counter);
  const auto before = std::prev(after);  // there always is one: the first range begins at 0
  if (counter < before->second) return false;
  const bool joins_before = before->second == counter;
  const bool joins_after = after != ranges_.end() && after->first == counter + 1;
  if (joins_before) {
    before->second = joins_after ? after->second : counter + 1;
    if (joins_after) ranges_.erase(after);
  } else if (joins_after) {
    const std::uint64_t end = after->second;
    ranges_.erase(after);
    ranges_.emplace(counter, end);
  } else {
    ranges_.emplace(counter, counter + 1);
  }
  if (ranges_.size() > most_ranges) {
    const auto second = std::next(ranges_.begin());
    ranges_.begin()->second = second->second;
    ranges_.erase(second);
  }
  return true;
}

}  // namespace rpc_ext
