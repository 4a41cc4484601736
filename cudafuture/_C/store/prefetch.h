// Prefetching of memory into the processor's cache.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cudafuture::store {

// Prefetches each cache line of the memory; the address need not be valid.
inline void prefetch(const void* memory, std::size_t size) noexcept {
  constexpr std::uintptr_t kCacheLine = 64;
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  for (std::uintptr_t line = begin / kCacheLine * kCacheLine; line < begin + size; line += kCacheLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

}  // namespace cudafuture::store
