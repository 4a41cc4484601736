// The statistics of a store.
#pragma once

#include <atomic>
#include <cstdint>

#include "io/counter.h"
#include "store/index.h"
#include "store/slabs.h"

namespace cudafuture::store {

struct StoreStatistics {
  std::uint64_t keys = 0;
  std::uint64_t bytes = 0;  // of their tensors
  std::uint64_t used = 0;   // of all extents: also those being written, or still read after their key was replaced
  std::uint64_t slabs = 0;
  std::uint64_t slab_bytes = 0;
  std::uint64_t journal_bytes = 0;
  std::uint64_t reads = 0;  // tensors whose read has ended
  std::uint64_t writes = 0;
  std::uint64_t transfers = 0;  // requests to the engine
  std::uint64_t checksum_errors = 0;
  std::uint64_t pending = 0;  // calls
};

struct StoreCounters {
  io::Counter reads{0}, writes{0}, transfers{0}, checksum_errors{0}, pending{0};
};

inline StoreStatistics statistics_of(const StoreCounters& counters, const Index::Statistics& index,
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
