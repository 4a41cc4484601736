// Host tensors whose memory is suitable for direct I/O.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace cudafuture::io {

struct Shape {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  c10::SmallVector<std::int64_t, 2> sizes;

  bool operator==(const Shape&) const = default;
};

// Returns the bytes of a tensor; none: more than the largest file has, or a size is negative.
std::optional<std::uint64_t> bytes_of(const Shape& shape);

// Returns a new tensor, not filled. From 4 MiB on its memory begins at a huge page, so no part of it has to be staged
// and its first use causes few page faults. Smaller tensors are better staged: direct I/O into many new pages costs
// more than a copy to them.
at::Tensor make_tensor_on_host(const Shape& shape);

// Allocates memory suitable for direct I/O: page-aligned, and from 2 MiB on aligned to a huge page.
c10::Allocator& aligned_allocator();

// Returns a tensor of `size` bytes in memory suitable for direct I/O.
at::Tensor make_aligned_bytes(std::size_t size);

}  // namespace cudafuture::io
