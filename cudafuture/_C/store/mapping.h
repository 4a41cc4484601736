// Tensors whose memory is a mapping of files.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "store/entry.h"

namespace cudafuture::store {

// Returns the tensor of a key without reading it: pages are loaded when they are accessed, and changes stay in this
// process. The tensor keeps the extent allocated. For several keys, it returns one flat tensor of all their elements.
// `verify` reads all of it and compares the checksums. Throws Failure, and std::invalid_argument if several tensors
// cannot be adjacent.
at::Tensor map_tensors(const std::vector<EntryPtr>& entries, const std::vector<std::string>& keys, bool verify);

}  // namespace cudafuture::store
