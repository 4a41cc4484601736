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
  std::uint64_t size() const noexcept { return place.size(); }  // bytes

  Shape shape;
  Place place;             // none: no bytes
  std::uint64_t turn = 0;  // of its write among all writes and deletions: a later one wins
  std::uint64_t digest = 0;
  bool has_digest = false;
};
using EntryPtr = std::shared_ptr<const Entry>;

}  // namespace cudafuture::storage
