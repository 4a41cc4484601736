#include "store/write_batcher.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "store/slabs.h"

namespace cudafuture::store {

std::vector<std::uint64_t> sizes_of(const Writes& writes) {
  std::vector<std::uint64_t> sizes;
  for (const Write& write : writes) sizes.push_back(write.memory.size());
  return sizes;
}

std::vector<Writes> WriteBatcher::cut(WriteList writes, std::uint64_t size) {
  const auto end_behind = [](std::uint64_t end, const Write& write) {
    return Slabs::next_offset(end, write.memory.size()) + write.memory.size();
  };
  std::vector<Writes> batches;
  while (!writes.empty()) {
    std::uint64_t end = writes.front().memory.size();
    auto next = writes.begin() + 1;
    for (; next != writes.end() && end_behind(end, *next) <= size; ++next) end = end_behind(end, *next);
    batches.emplace_back(std::move_iterator(writes.begin()), std::move_iterator(next));
    writes.erase(writes.begin(), next);
  }
  return batches;
}

std::vector<Writes> WriteBatcher::add(WriteList&& writes) {
  std::lock_guard lock(mutex_);
  for (const Write& write : writes) bytes_ += write.memory.size();
  if (waiting_.empty()) {
    waiting_ = std::move(writes);
  } else {
    std::move(writes.begin(), writes.end(), std::back_inserter(waiting_));
  }
  return take(false);
}

std::vector<Writes> WriteBatcher::ended() {
  std::lock_guard lock(mutex_);
  return take(true);
}

std::vector<Writes> WriteBatcher::take(bool ended) {
  if (ended) --in_flight_;
  if (waiting_.empty() || (in_flight_ != 0 && bytes_ < size_)) return {};
  std::vector<Writes> batches = cut(std::exchange(waiting_, {}), size_);
  bytes_ = 0;
  std::uint64_t last = 0;
  for (const Write& write : batches.back()) last += write.memory.size();
  if (last < size_ && (in_flight_ != 0 || batches.size() > 1)) {
    waiting_.assign(std::move_iterator(batches.back().begin()), std::move_iterator(batches.back().end()));
    batches.pop_back();
    bytes_ = last;
  }
  in_flight_ += batches.size();
  return batches;
}

}  // namespace cudafuture::store
