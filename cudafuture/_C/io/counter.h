// Statistics counters: any thread may count, and no memory ordering is implied.
#pragma once

#include <atomic>
#include <cstdint>

namespace cudafuture::io {

using Counter = std::atomic<std::uint64_t>;

inline void add(Counter& counter, std::uint64_t amount = 1) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace cudafuture::io
