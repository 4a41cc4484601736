// Checksums of bytes, the same as those of a DiskStore.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "api/export.h"

namespace cudafuture::api {

// Loads XXH3, which the other functions need. Needs the GIL. Throws PythonError.
CUDAFUTURE_API void load_hash();

CUDAFUTURE_API std::uint64_t digest_of(const void* data, std::size_t size, std::uint64_t seed = 0);

// The checksum of a tensor that is transferred in parts.
class CUDAFUTURE_API Digest {
 public:
  virtual ~Digest() = default;
  // Takes the bytes from `at` on, a multiple of 64 KiB. Returns their own checksum. Several threads may call it.
  virtual std::uint64_t add(std::uint64_t at, const void* data, std::size_t size) noexcept = 0;
  virtual std::uint64_t value(std::uint64_t seed = 0) const noexcept = 0;  // after all bytes were added
};

CUDAFUTURE_API std::shared_ptr<Digest> make_digest(std::uint64_t nbytes);

}  // namespace cudafuture::api
