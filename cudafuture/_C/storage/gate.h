// Small reads on their way to the engine.
//
// As many go at once as keep it busy. Of the others, which wait, those of neighbours then go together: so many small
// reads are few large ones, though each was asked for by itself; and one that waits here takes less memory than one
// that the engine has.
//
// Lock: mutex_ guards everything; nothing is taken under it, and no read is dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "storage/call.h"
#include "storage/entry.h"
#include "storage/memory.h"

namespace cudafuture::storage {

// A tensor that is to be read, or some of its bytes.
struct Read {
  CallPtr call;
  std::string key;
  EntryPtr entry;
  Memory memory;                    // of the bytes to be read
  std::uint64_t* digest = nullptr;  // receives their digest; the call keeps it
  std::uint64_t at = 0;             // the first byte of the tensor to be read, where a leaf begins

  std::uint64_t offset() const noexcept { return entry->place.offset() + at; }  // in the slab
  std::uint64_t size() const noexcept { return memory.size(); }                 // bytes
};
using Reads = std::vector<Read>;    // that go together
using ReadList = std::deque<Read>;  // all of a call; see WriteList

class Gate {
 public:
  // The engine is busy with so many reads; bytes that go together at most.
  Gate(std::size_t busy, std::uint64_t size) : busy_(busy), size_(size) {}

  // Return what is to go now, each of which has to be followed by ended().
  std::vector<Reads> add(Read&& read);
  std::vector<Reads> ended();

  // Puts together those that lie side by side, as far as they have so many bytes.
  static std::vector<Reads> join(ReadList reads, std::uint64_t size);

 private:
  const std::size_t busy_;
  const std::uint64_t size_;
  std::mutex mutex_;
  ReadList waiting_;
  std::size_t under_way_ = 0;
};

}  // namespace cudafuture::storage
