// Small writes on their way to the disk together.
//
// A full pack goes at once; one that is not goes when no other is under way. So a small write never waits for company
// while the disk is idle, and many of them are few large ones.
//
// Lock: mutex_ guards everything; nothing is taken under it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "storage/call.h"
#include "storage/entry.h"
#include "storage/memory.h"

namespace cudafuture::storage {

struct Write {
  CallPtr call;
  std::string key;
  Shape shape;
  Memory memory;
  std::uint64_t turn = 0;
  std::optional<std::uint64_t> digest = std::nullopt;  // that its bytes must have
  bool* written = nullptr;                             // set when it was written; the call keeps it
};
using Writes = std::vector<Write>;  // that go together
// All of a call. In a vector, those of many keys would be one allocation of megabytes, which fits into no gap of the
// heap; and this frees memory from the front on, while its elements move on.
using WriteList = std::deque<Write>;
std::vector<std::uint64_t> sizes_of(const Writes& writes);  // bytes

class Packs {
 public:
  explicit Packs(std::uint64_t size) : size_(size) {}  // bytes of a pack at most

  // Return what is to go now, each of which has to be followed by ended().
  std::vector<Writes> add(WriteList&& writes);
  std::vector<Writes> ended();

  // Cuts writes into packs.
  static std::vector<Writes> cut(WriteList writes, std::uint64_t size);

 private:
  std::vector<Writes> take(bool ended);

  const std::uint64_t size_;
  std::mutex mutex_;
  WriteList waiting_;
  std::uint64_t bytes_ = 0;  // of those
  std::size_t under_way_ = 0;
};

}  // namespace cudafuture::storage
