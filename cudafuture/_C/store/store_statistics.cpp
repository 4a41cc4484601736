#include "store/store_statistics.h"

#include <atomic>

namespace cudafuture::store {

StoreStatistics statistics_of(const StoreCounters& counters, const Index::Statistics& index,
                              const Slabs::Statistics& slabs, std::uint64_t journal_bytes) noexcept {
  const auto read = [](const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  StoreStatistics s;
  s.keys = index.keys;
  s.bytes = index.bytes;
  s.used = slabs.used;
  s.slabs = slabs.slabs;
  s.slab_bytes = slabs.bytes;
  s.journal_bytes = journal_bytes;
  s.reads = read(counters.reads);
  s.writes = read(counters.writes);
  s.transfers = read(counters.transfers);
  s.checksum_errors = read(counters.checksum_errors);
  s.pending = read(counters.pending);
  return s;
}

}  // namespace cudafuture::store
