// What a store knows of a key: where its tensor is, what it looks like, and what its bytes must be.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>

#include "storage/slabs.h"

namespace cudafuture::storage {

struct Shape {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  c10::SmallVector<std::int64_t, 2> sizes;

  bool operator==(const Shape&) const = default;
};

// Never changed once it is known: whoever reads it has its place for as long.
struct Entry {
  const Place& place() const noexcept { return origin ? origin->own : own; }  // none: no bytes
  std::uint64_t size() const noexcept { return place().size(); }              // bytes
  Shape shape;
  Place own;
  std::uint64_t turn = 0;  // of its write among all writes, links and deletions: a later one wins
  std::uint64_t seed = 0;  // of the digest: the hash of the key that was written, so of a link that of another key
  std::uint64_t digest = 0;
  bool has_digest = false;
  std::shared_ptr<const Entry> origin = nullptr;  // of a link: the entry whose bytes it has
};
using EntryPtr = std::shared_ptr<const Entry>;

}  // namespace cudafuture::storage
