// The memory of one device: a caching allocator, ordered by streams.
//
// A freed block belongs to the stream that it was allocated on, and is handed out there again at once, the last freed
// first: work of that stream comes after what used it before. Streams that record_use() named must get to where they
// were at the free; until then it is held back. It goes to another stream only after the device was idle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "machine/shadow.h"
#include "sim/runtime/arena.h"
#include "sim/runtime/stream.h"

namespace sim::runtime {

class AcceleratorMemory {
 public:
  explicit AcceleratorMemory(int device) : arena_(Arena::of_device(device)) {}

  void* take(std::size_t bytes, Stream& owner, std::size_t limit);  // null: no room
  void give(const void* pointer, Shadow& shadow);                   // unknown pointers are ignored
  void use(const void* pointer, Stream& stream);

  // Frees the deferred blocks whose streams have finished with them. Never waits, and does nothing while `changes`
  // stays the same.
  void free_deferred(Shadow& shadow, std::uint64_t changes);
  std::vector<RecordingPtr> deferred_for() const;
  void release(Shadow& shadow);  // returns free memory to the arena, for any stream: no work may be running
  void give_pages_back() { arena_.give_pages_back(); }

  const MemoryStatistics& statistics() const noexcept { return statistics_; }
  void reset_totals() noexcept;
  void reset_peak() noexcept;
  std::size_t deferred() const noexcept { return deferred_.size(); }

 private:
  struct Block {
    std::size_t size;
    Stream* owner;
    std::vector<Stream*> users;  // others
  };
  struct Deferred {
    std::uintptr_t begin;
    std::size_t size;
    Stream* owner;
    std::vector<RecordingPtr> until;
  };
  using FreeList = std::map<std::size_t, std::vector<std::uintptr_t>>;  // by size; the last freed last

  bool free_if_reached(const Deferred& block, Shadow& shadow);
  std::uintptr_t take_free(Stream& owner, std::size_t size, std::size_t& found);

  Arena arena_;
  std::map<std::uintptr_t, Block> blocks_;  // in use
  std::map<Stream*, FreeList> free_;
  std::vector<Deferred> deferred_;
  std::uint64_t looked_at_ = 0;
  MemoryStatistics statistics_;
};

}  // namespace sim::runtime
