#include "sim/runtime/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

namespace sim::runtime {
namespace {

constexpr std::size_t kReadableStep = std::size_t{64} << 20;  // few calls of the kernel
constexpr std::size_t kPage = 4096;

// Asked for, not insisted on: the same program then shows the same addresses each time.
constexpr std::uintptr_t kPreferredBase = 0x500000000000;

std::runtime_error failure(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno) +
                            ". The simulated accelerator reserves addresses, not memory: raise the limit on address "
                            "space (ulimit -v unlimited) and allow overcommitment (vm.overcommit_memory 0 or 1)");
}

}  // namespace

void address_space::reserve() {
  if (base.load(std::memory_order_relaxed) >> 63 == 0) return;
  constexpr std::size_t bytes = 2 * kShownBytes + kPinnedBytes;
  void* const begin = mmap(reinterpret_cast<void*>(kPreferredBase), bytes, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) {
    throw failure("cannot reserve " + std::to_string(bytes >> 30) + " GiB of addresses for simulated device memory");
  }
  base.store(reinterpret_cast<std::uintptr_t>(begin), std::memory_order_relaxed);
}

Arena Arena::of_device(int device) {
  address_space::reserve();
  const std::uintptr_t begin = address_space::base + static_cast<std::size_t>(device) * kDeviceBytes;
  return {begin, kDeviceBytes, kShownBytes};
}

Arena Arena::of_pinned() {
  address_space::reserve();
  return {address_space::base + 2 * kShownBytes, kPinnedBytes, 0};
}

std::optional<std::uintptr_t> Arena::take(std::size_t bytes) {
  const auto piece = std::find_if(free_.begin(), free_.end(), [&](const auto& p) { return p.second >= bytes; });
  if (piece == free_.end()) return std::nullopt;
  const auto [begin, size] = *piece;
  make_readable(begin + bytes);
  free_.erase(piece);
  if (size > bytes) free_.emplace(begin + bytes, size - bytes);
  taken_ += bytes;
  return begin;
}

void Arena::give(std::uintptr_t begin, std::size_t bytes) {
  taken_ -= bytes;
  auto piece = free_.emplace(begin, bytes).first;
  if (piece != free_.begin()) {
    const auto before = std::prev(piece);
    if (before->first + before->second == begin) {
      before->second += bytes;
      free_.erase(piece);
      piece = before;
    }
  }
  const auto after = std::next(piece);
  if (after != free_.end() && piece->first + piece->second == after->first) {
    piece->second += after->second;
    free_.erase(after);
  }
}

void Arena::give_pages_back() {
  for (const auto& [begin, size] : free_) {
    const std::uintptr_t first = (begin + kPage - 1) / kPage * kPage;
    const std::uintptr_t last = std::min(begin + size, readable_) / kPage * kPage;
    if (first < last) madvise(reinterpret_cast<void*>(first + to_alias_), last - first, MADV_DONTNEED);
  }
}

void Arena::make_readable(std::uintptr_t end) {
  if (end <= readable_) return;
  const std::size_t bytes = std::min((end - readable_ + kReadableStep - 1) / kReadableStep * kReadableStep,
                                     static_cast<std::size_t>(end_ - readable_));
  if (mprotect(reinterpret_cast<void*>(readable_ + to_alias_), bytes, PROT_READ | PROT_WRITE) != 0) {
    throw failure("cannot get " + std::to_string(bytes >> 20) + " MiB of simulated device memory");
  }
  readable_ += bytes;
}

}  // namespace sim::runtime
