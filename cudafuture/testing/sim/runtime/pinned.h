// Pinned host memory: cached, and not handed out again before the streams have finished the work that uses it.
//
// The streams that use a block are known from the accesses of their work. A use is in flight until the host has
// synchronized with it; a host access to the block before that is a race.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "machine/shadow.h"
#include "sim/runtime/arena.h"
#include "sim/runtime/stream.h"

namespace sim::runtime {

class Pinned {
 public:
  void* take(std::size_t bytes, Shadow& shadow);  // throws OutOfMemory when there are no addresses left
  void give(const void* pointer);                 // unknown pointers are ignored
  void start(Shadow& shadow);                     // nothing is in flight any more, and nothing is cached
  void release(Shadow& shadow);

  // Work that was just enqueued, and is this epoch of its stream, touches `access`.
  void note(const MemoryAccess& access, const Stream& stream, ClockEpoch epoch);
  void host_saw(const VectorClock& host);
  bool in_flight(const MemoryAccess& access) const;
  bool any_in_flight() const noexcept { return in_flight_.load(std::memory_order_relaxed) != 0; }

 private:
  // The last piece of work of a stream that touches a block.
  struct Use {
    const Stream* stream;
    std::uint64_t position;  // reached when the stream has done so many items
    ClockEpoch epoch;
  };
  struct Block {
    std::size_t size;
    bool freed = false;  // and held back
    std::vector<Use> uses;
  };
  using Blocks = std::map<std::uintptr_t, Block>;

  Blocks::const_iterator first_in(const MemoryAccess& access) const;
  void free_reached();
  void drop_uses(Block& block);

  std::optional<Arena> arena_;
  Blocks blocks_;  // in use or held back
  std::map<std::size_t, std::vector<std::uintptr_t>> free_;
  std::vector<std::uintptr_t> held_back_;
  std::atomic<std::size_t> in_flight_{0};  // uses
};

}  // namespace sim::runtime
