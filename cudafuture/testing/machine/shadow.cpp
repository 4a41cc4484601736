#include "machine/shadow.h"

#include <algorithm>
#include <iterator>

namespace machine {
namespace {

// Collects what one access races with: once for each earlier touch, with the bytes as far as they are adjacent.
class Conflicts {
 public:
  Conflicts(const VectorClock& clock, const Touch& later) : clock_(clock), later_(later) {}

  void check(const Touch& earlier, std::uintptr_t begin, std::uintptr_t end) {
    const ClockEpoch epoch = earlier.epoch;
    if (!earlier.exists() || epoch.agent == later_.epoch.agent || clock_.has_seen(epoch)) return;
    for (Conflict& known : found_) {
      if (known.earlier.epoch != epoch) continue;
      if (known.end == begin) known.end = end;
      return;
    }
    found_.push_back({earlier, later_, begin, end});
  }

  std::vector<Conflict> take() { return std::move(found_); }

 private:
  const VectorClock& clock_;
  const Touch& later_;
  std::vector<Conflict> found_;
};

}  // namespace

std::vector<Conflict> Shadow::touch(const MemoryAccess& access, const VectorClock& clock, const HostAction& action) {
  if (access.begin >= access.end) return {};
  const Touch mine{action, access.writes};
  const auto first = first_in(access.begin, access.end);
  Conflicts conflicts(clock, mine);
  for (auto at = first; at != cells_.end() && at->first < access.end; ++at) {
    const Cell& cell = at->second;
    conflicts.check(cell.write, at->first, cell.end);
    if (!access.writes) continue;
    for (const Touch& read : cell.reads) conflicts.check(read, at->first, cell.end);
  }
  std::vector<Conflict> found = conflicts.take();
  access.writes ? write(first, access, mine) : read(first, access, mine);
  return found;
}

void Shadow::forget_seen(std::uintptr_t begin, std::uintptr_t end, const VectorClock& seen) {
  if (begin >= end) return;
  for (auto at = first_in(begin, end); at != cells_.end() && at->first < end;) {
    Cell& cell = at->second;
    if (seen.has_seen(cell.write.epoch)) drop(cell.write);
    std::erase_if(cell.reads, [&](Touch& read) {
      const bool gone = seen.has_seen(read.epoch);
      if (gone) drop(read);
      return gone;
    });
    at = !cell.write.exists() && cell.reads.empty() ? cells_.erase(at) : std::next(at);
  }
}

void Shadow::forget(std::uintptr_t begin, std::uintptr_t end) {
  if (begin >= end) return;
  for (auto at = first_in(begin, end); at != cells_.end() && at->first < end; at = cells_.erase(at)) drop(at->second);
}

// Makes `address` a border between cells. Returns the first cell at or after it.
Shadow::Cells::iterator Shadow::split_at(std::uintptr_t address) {
  const auto next = cells_.lower_bound(address);
  if (next == cells_.begin()) return next;
  Cell& before = std::prev(next)->second;
  if (before.end <= address) return next;
  Cell right = before;
  before.end = address;
  return cells_.emplace_hint(next, address, std::move(right));
}

// Makes both ends borders and returns the first cell between them, or the one after.
Shadow::Cells::iterator Shadow::first_in(std::uintptr_t begin, std::uintptr_t end) {
  const auto first = split_at(begin);
  if (first == cells_.end() || (first->first == begin && first->second.end == end)) return first;  // nothing to split
  const auto last = split_at(end);
  return first->first < end ? first : last;
}

void Shadow::drop(Touch& touch) {
  if (touch.site != nullptr) dropped_.push_back(std::move(touch.site));
  touch = {};
}

void Shadow::drop(Cell& cell) {
  drop(cell.write);
  for (Touch& read : cell.reads) drop(read);
  cell.reads.clear();
}

// Drops the earlier accesses. An access that is ordered after the write is ordered after them too; otherwise the write
// was reported.
void Shadow::write(Cells::iterator first, const MemoryAccess& access, const Touch& touch) {
  auto at = first;
  for (; at != cells_.end() && at->first < access.end; ++at) drop(at->second);
  if (at != first && first->first == access.begin) {
    cells_.erase(std::next(first), at);
  } else {
    cells_.erase(first, at);
    first = cells_.emplace_hint(at, access.begin, Cell{});
  }
  first->second.end = access.end;
  first->second.write = touch;
}

void Shadow::read(Cells::iterator first, const MemoryAccess& access, const Touch& touch) {
  std::uintptr_t covered = access.begin;
  auto at = first;
  for (; at != cells_.end() && at->first < access.end; ++at) {
    if (covered < at->first) cells_.emplace_hint(at, covered, Cell{at->first, {}, {touch}});
    note_read(at->second, touch);
    covered = at->second.end;
  }
  if (covered < access.end) cells_.emplace_hint(at, covered, Cell{access.end, {}, {touch}});
}

void Shadow::note_read(Cell& cell, const Touch& touch) {
  const auto same_agent = [&](const Touch& read) { return read.epoch.agent == touch.epoch.agent; };
  const auto known = std::find_if(cell.reads.begin(), cell.reads.end(), same_agent);
  if (known == cell.reads.end()) {
    cell.reads.push_back(touch);
  } else {
    drop(*known);
    *known = touch;
  }
}

}  // namespace machine
