// What a store knows of a key: where its tensor is, what it looks like, and what its bytes must be.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "storage/prefetch.h"
#include "storage/slabs.h"

namespace cudafuture::storage {

struct Shape {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  c10::SmallVector<std::int64_t, 2> sizes;

  bool operator==(const Shape&) const = default;
};

// Immutable once it is in the index. A link shares the entry of the key that it links to, and every reader of a key
// holds the key's entry. The place is free when the last holder has dropped the entry.
struct Entry {
  std::uint64_t size() const noexcept { return place.size(); }  // bytes
  Shape shape;
  Place place;             // none: no bytes
  std::uint64_t seed = 0;  // of the digest: the hash of the key that was written, also where a link shares the entry
  std::uint64_t digest = 0;
  bool has_digest = false;
};
using EntryPtr = std::shared_ptr<const Entry>;

// Starts to load the entry and the count of its owners, which lies before it (make_shared).
inline void prefetch_entry(const EntryPtr& entry) noexcept {
  constexpr std::size_t kCounts = 16;  // bytes
  if (entry != nullptr) prefetch(reinterpret_cast<const char*>(entry.get()) - kCounts, sizeof(Entry) + kCounts);
}

// Drops the entries, and with the last owner of each its place. Loads entries ahead: they may be long out of the cache.
inline void drop(std::vector<EntryPtr>&& entries) noexcept {
  constexpr std::size_t kAhead = 16;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i + kAhead < entries.size()) prefetch_entry(entries[i + kAhead]);
    entries[i] = nullptr;
  }
}

}  // namespace cudafuture::storage
