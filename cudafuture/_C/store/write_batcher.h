// A write batcher: small writes go to the disk in batches.
//
// A full batch is submitted at once; a partial one is submitted when no other batch is in flight. So a small write
// never waits while the disk is idle, and many small writes become few large ones.
//
// Lock: mutex_ guards all fields; no other lock is taken under it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "io/memory.h"
#include "store/call.h"
#include "store/entry.h"

namespace cudafuture::store {

struct Write {
  CallPtr call;
  std::string key;
  io::Shape shape;
  io::Memory memory;
  std::uint64_t sequence = 0;
  std::optional<std::uint64_t> digest = std::nullopt;  // the required checksum of its bytes
  bool* written = nullptr;                             // set after the write; the call owns it
};
using Writes = std::vector<Write>;  // submitted together
// All writes of a call. A vector of the writes of many keys would be one allocation of megabytes, which fits into no
// gap of the heap. A deque also frees memory from the front while its elements are moved out.
using WriteList = std::deque<Write>;
std::vector<std::uint64_t> sizes_of(const Writes& writes);  // bytes

class WriteBatcher {
 public:
  explicit WriteBatcher(std::uint64_t size) : size_(size) {}  // bytes of a batch at most

  // Return the batches to submit now; ended() must follow each of them.
  std::vector<Writes> add(WriteList&& writes);
  std::vector<Writes> ended();

  // Cuts writes into batches.
  static std::vector<Writes> cut(WriteList writes, std::uint64_t size);

 private:
  std::vector<Writes> take(bool ended);

  const std::uint64_t size_;
  std::mutex mutex_;
  WriteList waiting_;
  std::uint64_t bytes_ = 0;  // of the waiting writes
  std::size_t in_flight_ = 0;
};

}  // namespace cudafuture::store
