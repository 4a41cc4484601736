// The last accesses to each range of bytes, and the check that two conflicting accesses are ordered.
//
// A range of bytes remembers its last write and, for each agent, its last read since. Accesses of two agents conflict
// if one of them writes. A conflict is a race if the clock of the later access has not seen the epoch of the earlier
// one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "machine/site.h"
#include "machine/vector_clock.h"

namespace machine {

// The bytes of device memory, or of pinned host memory, that an operation reads or writes.
struct MemoryAccess {
  static MemoryAccess of(const void* pointer, std::size_t bytes, bool writes) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
    return {begin, begin + bytes, writes};
  }

  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;  // exclusive
  bool writes = false;
};

// An action of the host that accesses memory: it enqueues work on a stream, hands out memory, or touches memory itself.
struct HostAction {
  ClockEpoch epoch;  // of the stream; of the host if it touches memory itself
  SitePtr site;
  bool allocates = false;  // the memory is handed out
};

// An action with what it does to a range of bytes.
struct Touch : HostAction {
  bool exists() const noexcept { return epoch.time != 0; }

  bool writes = false;
};

struct Conflict {
  Touch earlier;
  Touch later;
  std::uintptr_t begin = 0;  // of the bytes that both touch
  std::uintptr_t end = 0;
};

class Shadow {
 public:
  // Notes an access of an action and returns its races, at most one for each earlier touch.
  std::vector<Conflict> touch(const MemoryAccess& access, const VectorClock& clock, const HostAction& action);

  // Forgets the accesses to these bytes that `seen` has seen: an allocator may hand out the memory once an event is
  // reached, and that orders nothing else.
  void forget_seen(std::uintptr_t begin, std::uintptr_t end, const VectorClock& seen);
  void forget(std::uintptr_t begin, std::uintptr_t end);
  std::size_t ranges() const noexcept { return cells_.size(); }

  // Returns the sites of forgotten and overwritten touches. The simulated accelerator destroys them after it has
  // released its submission lock (~MachineCall), because the destructor of a Python stack may take other locks.
  // fakecuda destroys them under the lock of CudaMachine: its sites leave their frames to torch, which frees them in a
  // later call that holds Python's lock.
  std::vector<SitePtr> take_dropped() noexcept { return std::exchange(dropped_, {}); }

 private:
  struct Cell {
    std::uintptr_t end;
    Touch write;               // may not exist
    std::vector<Touch> reads;  // one for each agent
  };
  using Cells = std::map<std::uintptr_t, Cell>;

  Cells::iterator split_at(std::uintptr_t address);
  Cells::iterator first_in(std::uintptr_t begin, std::uintptr_t end);
  void drop(Touch& touch);
  void drop(Cell& cell);
  void write(Cells::iterator first, const MemoryAccess& access, const Touch& touch);
  void read(Cells::iterator first, const MemoryAccess& access, const Touch& touch);
  void note_read(Cell& cell, const Touch& touch);

  Cells cells_;  // by their first byte; they do not overlap
  std::vector<SitePtr> dropped_;
};

}  // namespace machine
