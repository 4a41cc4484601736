#include "store/read_coalescer.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "io/page.h"

namespace cudafuture::store {

using namespace io;

namespace {

constexpr std::size_t kMostTogether = 1024;  // reads among which neighbours are searched

std::uint64_t end_of(const Read& read) noexcept { return read.offset() + read.size(); }

bool are_neighbours(const Read& read, const Read& next) noexcept {
  return &read.entry->extent.slab() == &next.entry->extent.slab() && next.offset() >= end_of(read) &&
         next.offset() - end_of(read) < kPage;
}

}  // namespace

std::vector<Reads> ReadCoalescer::join(ReadList reads, std::uint64_t size) {
  const auto where = [](const Read& read) { return std::pair(read.entry->extent.slab().number, read.offset()); };
  std::sort(reads.begin(), reads.end(), [&](const Read& a, const Read& b) { return where(a) < where(b); });
  std::vector<Reads> joined;
  while (!reads.empty()) {
    const std::uint64_t begin = reads.front().offset() / kPage * kPage;
    auto next = reads.begin() + 1;
    while (next != reads.end() && are_neighbours(next[-1], *next) && end_of(*next) + kPage - begin <= size) {
      ++next;
    }
    joined.emplace_back(std::move_iterator(reads.begin()), std::move_iterator(next));
    reads.erase(reads.begin(), next);
  }
  return joined;
}

std::vector<Reads> ReadCoalescer::add(Read&& read) {
  std::lock_guard lock(mutex_);
  if (!waiting_.empty() || in_flight_ >= 2 * busy_) {
    waiting_.push_back(std::move(read));
    return {};
  }
  ++in_flight_;
  std::vector<Reads> alone(1);
  alone.front().push_back(std::move(read));
  return alone;
}

std::vector<Reads> ReadCoalescer::ended() {
  std::lock_guard lock(mutex_);
  --in_flight_;
  std::vector<Reads> joined;
  while (!waiting_.empty() && in_flight_ <= busy_) {
    const auto some = waiting_.begin() + static_cast<std::ptrdiff_t>(std::min(waiting_.size(), kMostTogether));
    ReadList reads(std::move_iterator(waiting_.begin()), std::move_iterator(some));
    waiting_.erase(waiting_.begin(), some);
    std::vector<Reads> more = join(std::move(reads), size_);
    in_flight_ += more.size();
    std::move(more.begin(), more.end(), std::back_inserter(joined));
  }
  return joined;
}

}  // namespace cudafuture::store
