#include "sim/runtime/memory.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sim::runtime {

void* AcceleratorMemory::take(std::size_t bytes, Stream& owner, std::size_t limit) {
  const std::size_t size = rounded(bytes);
  std::size_t found = size;
  std::uintptr_t begin = take_free(owner, size, found);
  if (begin == 0) {
    if (size > limit || arena_.taken() > limit - size) return nullptr;
    const auto fresh = arena_.take(size);
    if (!fresh.has_value()) return nullptr;
    begin = *fresh;
    statistics_.reserved.add(size);
  }
  blocks_.emplace(begin, Block{found, &owner, {}});
  statistics_.allocated.add(found);
  return reinterpret_cast<void*>(begin);
}

// A block is not split: the smallest that fits, if that wastes less than half of it.
std::uintptr_t AcceleratorMemory::take_free(Stream& owner, std::size_t size, std::size_t& found) {
  const auto list = free_.find(&owner);
  if (list == free_.end()) return 0;
  const auto fit = list->second.lower_bound(size);
  if (fit == list->second.end() || fit->first >= 2 * size) return 0;
  found = fit->first;
  const std::uintptr_t begin = fit->second.back();
  fit->second.pop_back();
  if (fit->second.empty()) list->second.erase(fit);
  return begin;
}

void AcceleratorMemory::give(const void* pointer, Shadow& shadow) {
  const auto at = blocks_.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (at == blocks_.end()) return;
  const Block& block = at->second;
  Deferred freed{at->first, block.size, block.owner, {}};
  for (Stream* user : block.users) freed.until.push_back(user->record());
  statistics_.allocated.remove(block.size);
  blocks_.erase(at);
  if (!free_if_reached(freed, shadow)) deferred_.push_back(std::move(freed));
}

void AcceleratorMemory::use(const void* pointer, Stream& stream) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto at = blocks_.upper_bound(address);
  if (at == blocks_.begin()) return;
  Block& block = (--at)->second;
  if (address >= at->first + block.size || &stream == block.owner) return;
  if (std::find(block.users.begin(), block.users.end(), &stream) == block.users.end()) block.users.push_back(&stream);
}

void AcceleratorMemory::free_deferred(Shadow& shadow, std::uint64_t changes) {
  if (std::exchange(looked_at_, changes) == changes) return;
  std::erase_if(deferred_, [&](const Deferred& block) { return free_if_reached(block, shadow); });
}

// The allocator learns that the streams got there; the host, and other streams, do not.
bool AcceleratorMemory::free_if_reached(const Deferred& block, Shadow& shadow) {
  const auto reached = [](const RecordingPtr& r) { return r->reached(); };
  if (!std::all_of(block.until.begin(), block.until.end(), reached)) return false;
  for (const RecordingPtr& r : block.until) {
    if (r->seen.clock != nullptr) shadow.forget_seen(block.begin, block.begin + block.size, *r->seen.clock);
  }
  free_[block.owner][block.size].push_back(block.begin);
  return true;
}

std::vector<RecordingPtr> AcceleratorMemory::deferred_for() const {
  std::vector<RecordingPtr> all;
  for (const Deferred& block : deferred_) all.insert(all.end(), block.until.begin(), block.until.end());
  return all;
}

void AcceleratorMemory::release(Shadow& shadow) {
  std::erase_if(deferred_, [&](const Deferred& block) { return free_if_reached(block, shadow); });
  for (const auto& [owner, list] : free_) {
    for (const auto& [size, begins] : list) {
      for (const std::uintptr_t begin : begins) {
        shadow.forget(begin, begin + size);
        arena_.give(begin, size);
        statistics_.reserved.remove(size);
      }
    }
  }
  free_.clear();
}

void AcceleratorMemory::reset_totals() noexcept {
  statistics_.allocated.reset_totals();
  statistics_.reserved.reset_totals();
}

void AcceleratorMemory::reset_peak() noexcept {
  statistics_.allocated.reset_peak();
  statistics_.reserved.reset_peak();
}

}  // namespace sim::runtime
