// Addresses: one reservation for all devices and pinned memory, and arenas that hand out pieces of it.
//
//     base                     + kShownBytes                  + 2 * kShownBytes
//     │ what tensors show      │ the same memory, for work    │ pinned memory │
//     │ never readable         │ readable where handed out    │ readable where handed out
//
// The host that follows a device address faults at once instead of reading what a device would not have finished.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "sim/runtime/accelerator.h"

namespace sim::runtime {

constexpr std::size_t kDeviceBytes = std::size_t{64} << 30;
constexpr std::size_t kShownBytes = kMaxDevices * kDeviceBytes;
constexpr std::size_t kPinnedBytes = std::size_t{64} << 30;
constexpr std::size_t kGranularity = 512;

constexpr std::size_t rounded(std::size_t bytes) noexcept {
  return (bytes + kGranularity - 1) / kGranularity * kGranularity;
}

namespace address_space {

// Before the reservation this is an address that no pointer is near to.
inline std::atomic<std::uintptr_t> base{std::uintptr_t{1} << 63};

void reserve();  // once; throws std::runtime_error where the process may not have so many addresses

inline std::uintptr_t offset_of(const void* pointer) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer) - base.load(std::memory_order_relaxed);
}
inline bool is_shown(const void* pointer) noexcept { return offset_of(pointer) < kShownBytes; }
inline bool is_pinned(const void* pointer) noexcept { return offset_of(pointer) - 2 * kShownBytes < kPinnedBytes; }
inline void* alias(const void* pointer) noexcept {
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(pointer) + (is_shown(pointer) ? kShownBytes : 0));
}
inline int device_of(const void* shown) noexcept { return static_cast<int>(offset_of(shown) / kDeviceBytes); }

}  // namespace address_space

// Pieces of one range of addresses: the lowest that fits.
class Arena {
 public:
  static Arena of_device(int device);
  static Arena of_pinned();

  std::optional<std::uintptr_t> take(std::size_t bytes);  // nothing: no room in the range
  void give(std::uintptr_t begin, std::size_t bytes);
  void give_pages_back();  // what is free takes no memory until it is taken again
  std::size_t taken() const noexcept { return taken_; }

 private:
  Arena(std::uintptr_t begin, std::size_t bytes, std::size_t to_alias)
      : end_(begin + bytes), to_alias_(to_alias), readable_(begin) {
    free_.emplace(begin, bytes);
  }
  void make_readable(std::uintptr_t end);

  std::uintptr_t end_;
  std::size_t to_alias_;                        // from an address to where the memory is
  std::uintptr_t readable_;                     // up to here
  std::map<std::uintptr_t, std::size_t> free_;  // by address; no two are adjacent
  std::size_t taken_ = 0;
};

}  // namespace sim::runtime
