// What a store knows of a key: where its tensor is, what it looks like, and what its bytes must be.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "storage/slabs.h"

namespace cudafuture::storage {

struct Shape {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<std::int64_t> sizes;

  bool operator==(const Shape&) const = default;
};

struct Entry {
  Shape shape;
  std::uint64_t size = 0;  // bytes
  PlacePtr place;          // null: no bytes
  std::uint64_t digest = 0;
  bool has_digest = false;
  std::uint64_t turn = 0;  // of its write among all writes and deletions: a later one wins
};

}  // namespace cudafuture::storage
