// A tensor whose memory is a stretch of a file.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "storage/entry.h"

namespace cudafuture::storage {

// The tensor of a key, without reading it: pages come from the disk when they are touched, and changes to them stay in
// this process. It keeps the place. `verify` reads all of it and compares the digest. Throws Failure.
at::Tensor map_tensor(const EntryPtr& entry, const std::string& key, bool verify);

}  // namespace cudafuture::storage
