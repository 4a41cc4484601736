// A tensor whose memory is stretches of files.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "storage/entry.h"

namespace cudafuture::storage {

// The tensor of a key, without reading it: pages come from the disk when they are touched, and changes to them stay in
// this process. It keeps the place. Of several keys: one flat tensor of all their elements. `verify` reads all of it
// and compares the digests. Throws Failure, and std::invalid_argument where several tensors cannot lie side by side.
at::Tensor map_tensors(const std::vector<EntryPtr>& entries, const std::vector<std::string>& keys, bool verify);

}  // namespace cudafuture::storage
