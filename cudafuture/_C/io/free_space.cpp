#include "io/free_space.h"

#include <iterator>

namespace cudafuture::io {

FreeSpace::FreeSpace(std::uint64_t size) : size_(size) {
  if (size != 0) add(0, size);
}

void FreeSpace::add(std::uint64_t offset, std::uint64_t size) {
  by_offset_.emplace(offset, size);
  by_size_.emplace(size, offset);
  free_ += size;
}

void FreeSpace::remove(Runs::iterator run) {
  by_size_.erase({run->second, run->first});
  free_ -= run->second;
  by_offset_.erase(run);
}

std::optional<std::uint64_t> FreeSpace::take(std::uint64_t size) {
  const auto fit = by_size_.lower_bound({size, 0});
  if (fit == by_size_.end()) return std::nullopt;
  const std::uint64_t offset = fit->second;
  take_at(offset, size);
  return offset;
}

bool FreeSpace::take_at(std::uint64_t offset, std::uint64_t size) {
  auto run = by_offset_.upper_bound(offset);
  if (run == by_offset_.begin()) return false;
  --run;
  const auto [begin, length] = *run;
  if (offset + size > begin + length) return false;
  remove(run);
  if (offset > begin) add(begin, offset - begin);
  if (offset + size < begin + length) add(offset + size, begin + length - offset - size);
  return true;
}

void FreeSpace::release(std::uint64_t offset, std::uint64_t size) {
  const auto after = by_offset_.lower_bound(offset);
  const bool joins_after = after != by_offset_.end() && offset + size == after->first;
  if (after != by_offset_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      if (joins_after) {
        size += after->second;
        remove(after);
      }
      return extend(before, size);
    }
  }
  if (joins_after) {
    size += after->second;
    remove(after);
  }
  add(offset, size);
}

// Keeps the nodes of the run: giving back a batch of neighbours in order allocates nothing.
void FreeSpace::extend(Runs::iterator run, std::uint64_t size) {
  auto sized = by_size_.extract({run->second, run->first});
  run->second += size;
  free_ += size;
  sized.value().first = run->second;
  by_size_.insert(std::move(sized));
}

}  // namespace cudafuture::io
