#include "sim/runtime/pinned.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace sim::runtime {

void* Pinned::take(std::size_t bytes, Shadow& shadow) {
  if (!arena_.has_value()) arena_ = Arena::of_pinned();
  free_reached();
  std::size_t size = rounded(bytes);
  std::uintptr_t begin = 0;
  if (const auto fit = free_.lower_bound(size); fit != free_.end() && fit->first < 2 * size) {
    size = fit->first;
    begin = fit->second.back();
    fit->second.pop_back();
    if (fit->second.empty()) free_.erase(fit);
  } else {
    const auto fresh = arena_->take(size);
    if (!fresh.has_value()) {
      throw OutOfMemory("no room for " + std::to_string(bytes) + " bytes of pinned memory: " +
                        std::to_string(arena_->taken()) + " of " + std::to_string(kPinnedBytes) + " are taken");
    }
    begin = *fresh;
  }
  shadow.forget(begin, begin + size);
  blocks_.emplace(begin, Block{size, false, {}});
  return reinterpret_cast<void*>(begin);
}

void Pinned::give(const void* pointer) {
  const auto at = blocks_.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (at == blocks_.end() || at->second.freed) return;
  at->second.freed = true;
  held_back_.push_back(at->first);
  free_reached();
}

void Pinned::start(Shadow& shadow) {
  for (auto& [begin, block] : blocks_) drop_uses(block);
  free_reached();
  release(shadow);
}

void Pinned::release(Shadow& shadow) {
  if (!arena_.has_value()) return;
  free_reached();
  for (const auto& [size, begins] : free_) {
    for (const std::uintptr_t begin : begins) {
      shadow.forget(begin, begin + size);
      arena_->give(begin, size);
    }
  }
  free_.clear();
  arena_->give_pages_back();
}

void Pinned::note(const MemoryAccess& access, const Stream& stream, ClockEpoch epoch) {
  if (!address_space::is_pinned(reinterpret_cast<const void*>(access.begin))) return;
  for (auto at = first_in(access); at != blocks_.end() && at->first < access.end; ++at) {
    Block& block = blocks_.find(at->first)->second;
    const auto same = [&](const Use& use) { return use.stream == &stream; };
    const auto known = std::find_if(block.uses.begin(), block.uses.end(), same);
    if (known == block.uses.end()) {
      block.uses.push_back({&stream, stream.enqueued(), epoch});
      in_flight_.fetch_add(1, std::memory_order_relaxed);
    } else {
      *known = {&stream, stream.enqueued(), epoch};
    }
  }
}

void Pinned::host_saw(const VectorClock& host) {
  if (!any_in_flight()) return;
  for (auto& [begin, block] : blocks_) {
    in_flight_.fetch_sub(std::erase_if(block.uses, [&](const Use& use) { return host.has_seen(use.epoch); }),
                         std::memory_order_relaxed);
  }
}

bool Pinned::in_flight(const MemoryAccess& access) const {
  for (auto at = first_in(access); at != blocks_.end() && at->first < access.end; ++at) {
    if (!at->second.uses.empty()) return true;
  }
  return false;
}

Pinned::Blocks::const_iterator Pinned::first_in(const MemoryAccess& access) const {
  auto at = blocks_.upper_bound(access.begin);
  if (at != blocks_.begin() && std::prev(at)->first + std::prev(at)->second.size > access.begin) --at;
  return at;
}

void Pinned::free_reached() {
  std::erase_if(held_back_, [&](std::uintptr_t begin) {
    Block& block = blocks_.find(begin)->second;
    const auto reached = [](const Use& use) { return use.stream->done() >= use.position; };
    if (!std::all_of(block.uses.begin(), block.uses.end(), reached)) return false;
    drop_uses(block);
    free_[block.size].push_back(begin);
    blocks_.erase(begin);
    return true;
  });
}

void Pinned::drop_uses(Block& block) {
  in_flight_.fetch_sub(block.uses.size(), std::memory_order_relaxed);
  block.uses.clear();
}

}  // namespace sim::runtime
