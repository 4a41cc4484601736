// A store's entry for a key: the extent of its tensor, its shape, and its checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "io/aligned.h"
#include "store/prefetch.h"
#include "store/slabs.h"

namespace cudafuture::store {

// Immutable once it is in the index. A link shares the entry of its target key, and every reader of a key holds the
// key's entry. The extent is freed when the last owner drops the entry.
struct Entry {
  std::uint64_t size() const noexcept { return extent.size(); }  // bytes
  io::Shape shape;
  Extent extent;           // none: no bytes
  std::uint64_t seed = 0;  // of the checksum: the hash of the key that was written, also in entries that links share
  std::uint64_t digest = 0;
  bool has_digest = false;
};
using EntryPtr = std::shared_ptr<const Entry>;

// Prefetches the entry and its reference count, which lies before it (make_shared).
inline void prefetch_entry(const EntryPtr& entry) noexcept {
  constexpr std::size_t kCounts = 16;  // bytes
  if (entry != nullptr) prefetch(reinterpret_cast<const char*>(entry.get()) - kCounts, sizeof(Entry) + kCounts);
}

// Drops the entries; the last owner of an entry frees its extent. Prefetches entries, which may not be in the cache any
// more.
inline void drop(std::vector<EntryPtr>&& entries) noexcept {
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i + kAhead < entries.size()) prefetch_entry(entries[i + kAhead]);
    entries[i] = nullptr;
  }
}

}  // namespace cudafuture::store
