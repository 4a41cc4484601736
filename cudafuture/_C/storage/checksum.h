// The digests of tensors while they are on their way: each is taken leaf by leaf, as its blocks pass by, in any order.
//
// The digest of bytes is XXH3 over those of their leaves of 64 KiB. That which a store keeps of a tensor is seeded with
// the hash of its key: so neither its bytes nor its name can change without a word.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace cudafuture::storage {

// XXH3_64bits_withSeed of the xxHash library, which the binding has found. Set before the first checksum is made.
using Hash = std::uint64_t (*)(const void* data, std::size_t size, std::uint64_t seed);
void set_hash(Hash hash) noexcept;
std::uint64_t hash_of(const void* data, std::size_t size, std::uint64_t seed = 0) noexcept;
std::uint64_t hash_of(std::string_view text) noexcept;

// Of bytes that lie together.
std::uint64_t digest_of(const void* data, std::size_t size);

class Checksum {
 public:
  static constexpr std::size_t kLeaf = 64 * 1024;

  void reserve(std::size_t parts);  // of one leaf each
  // One more part of the request's memory. Between parts there may be bytes that do not count.
  void add(std::size_t begin, std::size_t size);

  // Those bytes from `at` on have passed by. They begin and end with leaves, and no leaf lies in two pieces.
  void take(std::size_t at, const iovec* pieces, std::size_t count) noexcept;

  // The leaves of another checksum's only part are those of this one's, from byte `at` on, where a leaf begins.
  void copy(std::size_t at, const Checksum& part) noexcept;

  std::size_t parts() const noexcept { return parts_.size(); }
  std::uint64_t digest(std::size_t part, std::uint64_t seed = 0) const noexcept;
  // The digest of some bytes of a part, which have passed by: from `at` in the part on, where a leaf begins.
  std::uint64_t digest_within(std::size_t part, std::size_t at, std::size_t size) const noexcept;

 private:
  struct Part {
    std::size_t begin;
    std::size_t size;
    std::size_t first;  // of its leaves
  };

  static std::size_t leaves_of(std::size_t size) noexcept { return (size + kLeaf - 1) / kLeaf; }

  std::vector<Part> parts_;
  std::vector<std::uint64_t> leaves_;
};

// Null: neither are they all to be checked, nor is the digest of any of them asked for.
template <class Part>
std::shared_ptr<Checksum> checksum_of(const std::vector<Part>& parts, bool is_wanted) {
  for (const Part& part : parts) is_wanted = is_wanted || part.digest;
  if (!is_wanted) return nullptr;
  auto checksum = std::make_shared<Checksum>();
  checksum->reserve(parts.size());
  return checksum;
}

}  // namespace cudafuture::storage
