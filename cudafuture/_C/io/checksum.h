// Checksums of tensors during a transfer. Each is computed leaf by leaf as its blocks are transferred, in any order.
//
// The checksum of a run of bytes is the XXH3 of the hashes of its leaves of 64 KiB. A store seeds the checksum of a
// tensor with the hash of its key, so a changed byte and a changed name are both detected.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace cudafuture::io {

// XXH3_64bits_withSeed of the xxHash library, which the binding finds. Set before the first checksum is made.
using Hash = std::uint64_t (*)(const void* data, std::size_t size, std::uint64_t seed);
void set_hash(Hash hash) noexcept;
std::uint64_t hash_of(const void* data, std::size_t size, std::uint64_t seed = 0) noexcept;
std::uint64_t hash_of(std::string_view text) noexcept;

// Returns the checksum of contiguous bytes.
std::uint64_t digest_of(const void* data, std::size_t size, std::uint64_t seed = 0);

class Checksum {
 public:
  static constexpr std::size_t kLeaf = 64 * 1024;

  void reserve(std::size_t parts);  // parts of one leaf each
  // Adds a part of the request's memory. Bytes between parts are not part of any checksum.
  void add(std::size_t begin, std::size_t size);

  // Hashes the bytes from `at` on. They begin and end at leaves, and no leaf spans two pieces.
  void take(std::size_t at, const iovec* pieces, std::size_t count) noexcept;

  // Copies the leaves of the only part of another checksum to byte `at` of this one, where a leaf begins.
  void copy(std::size_t at, const Checksum& part) noexcept;

  std::size_t parts() const noexcept { return parts_.size(); }
  std::uint64_t digest(std::size_t part, std::uint64_t seed = 0) const noexcept;
  // Returns the checksum of transferred bytes of a part, from `at` in the part on, where a leaf begins.
  std::uint64_t digest_within(std::size_t part, std::size_t at, std::size_t size) const noexcept;

 private:
  struct Part {
    std::size_t begin;
    std::size_t size;
    std::size_t first;  // index of its first leaf
  };

  static std::size_t leaves_of(std::size_t size) noexcept { return (size + kLeaf - 1) / kLeaf; }

  std::vector<Part> parts_;
  std::vector<std::uint64_t> leaves_;
};

// Returns null if no part is verified and no part's checksum is requested.
template <class Part>
std::shared_ptr<Checksum> checksum_of(const std::vector<Part>& parts, bool is_wanted) {
  for (const Part& part : parts) is_wanted = is_wanted || part.digest;
  if (!is_wanted) return nullptr;
  auto checksum = std::make_shared<Checksum>();
  checksum->reserve(parts.size());
  return checksum;
}

}  // namespace cudafuture::io
