// The free space of one slab: extents, allocated best-fit.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace cudafuture::io {

class FreeSpace {
 public:
  explicit FreeSpace(std::uint64_t size);  // bytes; all of them free

  std::optional<std::uint64_t> take(std::uint64_t size);   // returns the offset; none: no run is long enough
  bool take_at(std::uint64_t offset, std::uint64_t size);  // false: part of it is not free
  void release(std::uint64_t offset, std::uint64_t size);  // merges it with adjacent runs

  std::uint64_t size() const noexcept { return size_; }
  std::uint64_t free() const noexcept { return free_; }
  std::size_t runs() const noexcept { return by_offset_.size(); }

 private:
  using Runs = std::map<std::uint64_t, std::uint64_t>;  // offset to size

  void add(std::uint64_t offset, std::uint64_t size);
  void remove(Runs::iterator run);
  void extend(Runs::iterator run, std::uint64_t size);  // by `size` bytes at its end

  std::uint64_t size_;
  std::uint64_t free_ = 0;
  Runs by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // size, offset
};

}  // namespace cudafuture::io
