// Counters for statistics: any thread counts, and no thread orders anything by them.
#pragma once

#include <atomic>
#include <cstdint>

namespace cudafuture::storage {

using Counter = std::atomic<std::uint64_t>;

inline void add(Counter& counter, std::uint64_t amount = 1) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace cudafuture::storage
