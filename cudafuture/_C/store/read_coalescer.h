// A read coalescer: small reads wait here while the engine is busy.
//
// It passes on as many reads as keep the engine busy. Reads that wait are then merged with adjacent ones, so many small
// reads become few large ones. A read that waits here also takes less memory than one in the engine.
//
// Lock: mutex_ guards all fields; no other lock is taken and no read is dropped under it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "io/memory.h"
#include "store/call.h"
#include "store/entry.h"

namespace cudafuture::store {

// A read of a tensor, or of some of its bytes.
struct Read {
  CallPtr call;
  std::string key;
  EntryPtr entry;
  io::Memory memory;                // destination of the bytes
  std::uint64_t* digest = nullptr;  // receives their checksum; the call owns it
  std::uint64_t at = 0;             // the tensor's first byte to read, where a leaf begins
  bool is_verified = true;          // a whole tensor is compared with the checksum that the store keeps

  std::uint64_t offset() const noexcept { return entry->extent.offset() + at; }  // in the slab
  std::uint64_t size() const noexcept { return memory.size(); }                  // bytes
};
using Reads = std::vector<Read>;    // merged into one request
using ReadList = std::deque<Read>;  // all reads of a call; see WriteList

inline bool any_verified(const Reads& reads) {
  return std::any_of(reads.begin(), reads.end(), [](const Read& read) { return read.is_verified; });
}

class ReadCoalescer {
 public:
  // `busy`: number of reads that keep the engine busy; `size`: maximum bytes of merged reads.
  ReadCoalescer(std::size_t busy, std::uint64_t size) : busy_(busy), size_(size) {}

  // Return the reads to submit now; ended() must follow each of them.
  std::vector<Reads> add(Read&& read);
  std::vector<Reads> ended();

  // Merges adjacent reads up to `size` bytes.
  static std::vector<Reads> join(ReadList reads, std::uint64_t size);

 private:
  const std::size_t busy_;
  const std::uint64_t size_;
  std::mutex mutex_;
  ReadList waiting_;
  std::size_t in_flight_ = 0;
};

}  // namespace cudafuture::store
