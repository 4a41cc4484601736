// The free space of one slab: runs of bytes, of which the smallest that will do is taken.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace cudafuture::storage {

class Extents {
 public:
  explicit Extents(std::uint64_t size);  // bytes; all of them are free

  std::optional<std::uint64_t> take(std::uint64_t size);     // where; none: no run is so long
  bool take_at(std::uint64_t offset, std::uint64_t size);    // false: not all of that is free
  void give_back(std::uint64_t offset, std::uint64_t size);  // joins what touches

  std::uint64_t size() const noexcept { return size_; }
  std::uint64_t free() const noexcept { return free_; }
  std::size_t runs() const noexcept { return by_offset_.size(); }

 private:
  using Runs = std::map<std::uint64_t, std::uint64_t>;  // offset to size

  void add(std::uint64_t offset, std::uint64_t size);
  void remove(Runs::iterator run);
  void extend(Runs::iterator run, std::uint64_t size);  // by that many bytes behind it

  std::uint64_t size_;
  std::uint64_t free_ = 0;
  Runs by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_size_;  // size, offset
};

}  // namespace cudafuture::storage
