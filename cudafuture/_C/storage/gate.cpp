#include "storage/gate.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "storage/page.h"

namespace cudafuture::storage {
namespace {

constexpr std::size_t kMostTogether = 1024;  // reads among which neighbours are looked for

}  // namespace

std::vector<Reads> Gate::join(Reads&& reads, std::uint64_t size) {
  const auto where = [](const Read& read) {
    const Place& place = read.entry->place;
    return std::pair(place.slab().number, place.offset());
  };
  std::sort(reads.begin(), reads.end(), [&](const Read& a, const Read& b) { return where(a) < where(b); });
  std::vector<Reads> joined;
  std::uint64_t begin = 0;
  for (Read& read : reads) {
    const Place& place = read.entry->place;
    if (!joined.empty()) {
      const Place& last = joined.back().back().entry->place;
      const std::uint64_t end = last.offset() + last.size();
      if (&last.slab() == &place.slab() && place.offset() >= end && place.offset() - end < kPage &&
          place.offset() + place.size() + kPage - begin <= size) {
        joined.back().push_back(std::move(read));
        continue;
      }
    }
    begin = place.offset() - place.offset() % kPage;
    joined.emplace_back().push_back(std::move(read));
  }
  return joined;
}

std::vector<Reads> Gate::add(Read&& read) {
  std::lock_guard lock(mutex_);
  if (!waiting_.empty() || under_way_ >= 2 * busy_) {
    waiting_.push_back(std::move(read));
    return {};
  }
  ++under_way_;
  std::vector<Reads> alone(1);
  alone.front().push_back(std::move(read));
  return alone;
}

std::vector<Reads> Gate::ended() {
  std::lock_guard lock(mutex_);
  --under_way_;
  std::vector<Reads> joined;
  while (!waiting_.empty() && under_way_ <= busy_) {
    const auto some = waiting_.begin() + static_cast<std::ptrdiff_t>(std::min(waiting_.size(), kMostTogether));
    Reads reads(std::move_iterator(waiting_.begin()), std::move_iterator(some));
    waiting_.erase(waiting_.begin(), some);
    std::vector<Reads> more = join(std::move(reads), size_);
    under_way_ += more.size();
    std::move(more.begin(), more.end(), std::back_inserter(joined));
  }
  return joined;
}

}  // namespace cudafuture::storage
