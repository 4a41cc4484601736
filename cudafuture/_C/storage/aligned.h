// Tensors on the host whose memory a disk can read and write as it is.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>

#include "storage/entry.h"

namespace cudafuture::storage {

// A new tensor, not filled. From 4 MiB on its memory begins at a huge page: nothing of it has to be staged, and there
// are few faults at its first use. Smaller ones are better staged: a disk that writes to many pages which are new costs
// more than a copy to them.
at::Tensor make_tensor_on_host(const Shape& shape);

// Allocates memory that a disk can take as it is: at a page, from 2 MiB on at a huge page.
c10::Allocator& aligned_allocator();

// So many bytes that a disk can take as they are.
at::Tensor make_aligned_bytes(std::size_t size);

}  // namespace cudafuture::storage
