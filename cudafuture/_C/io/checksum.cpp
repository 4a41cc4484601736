#include "io/checksum.h"

#include <algorithm>
#include <atomic>

namespace cudafuture::io {
namespace {

std::atomic<Hash> hash_function{nullptr};

}  // namespace

void set_hash(Hash hash) noexcept { hash_function.store(hash, std::memory_order_release); }

std::uint64_t hash_of(const void* data, std::size_t size, std::uint64_t seed) noexcept {
  return hash_function.load(std::memory_order_acquire)(data, size, seed);
}

std::uint64_t hash_of(std::string_view text) noexcept { return hash_of(text.data(), text.size()); }

std::uint64_t digest_of(const void* data, std::size_t size, std::uint64_t seed) {
  Checksum checksum;
  checksum.add(0, size);
  const iovec whole = {const_cast<void*>(data), size};
  checksum.take(0, &whole, 1);
  return checksum.digest(0, seed);
}

void Checksum::reserve(std::size_t parts) {
  parts_.reserve(parts);
  leaves_.reserve(parts);
}

void Checksum::add(std::size_t begin, std::size_t size) {
  parts_.push_back({begin, size, leaves_.size()});
  leaves_.resize(leaves_.size() + leaves_of(size));
}

void Checksum::take(std::size_t at, const iovec* pieces, std::size_t count) noexcept {
  auto part = std::upper_bound(parts_.begin(), parts_.end(), at,
                               [](std::size_t value, const Part& other) { return value < other.begin; });
  if (part != parts_.begin()) --part;
  for (std::size_t i = 0; i < count; ++i) {
    const auto* const data = static_cast<const std::byte*>(pieces[i].iov_base);
    const std::size_t end = at + pieces[i].iov_len;
    while (part != parts_.end() && part->begin < end) {
      const std::size_t part_end = part->begin + part->size;
      for (std::size_t leaf = std::max(at, part->begin); leaf < std::min(end, part_end); leaf += kLeaf) {
        const std::size_t size = std::min({kLeaf, part_end - leaf, end - leaf});
        leaves_[part->first + (leaf - part->begin) / kLeaf] = hash_of(data + (leaf - at), size);
      }
      if (part_end > end) break;
      ++part;
    }
    at = end;
  }
}

void Checksum::copy(std::size_t at, const Checksum& part) noexcept {
  std::copy(part.leaves_.begin(), part.leaves_.end(), leaves_.begin() + static_cast<std::ptrdiff_t>(at / kLeaf));
}

std::uint64_t Checksum::digest(std::size_t part, std::uint64_t seed) const noexcept {
  const Part& of = parts_[part];
  return hash_of(leaves_.data() + of.first, leaves_of(of.size) * sizeof(std::uint64_t), seed);
}

std::uint64_t Checksum::digest_within(std::size_t part, std::size_t at, std::size_t size) const noexcept {
  return hash_of(leaves_.data() + parts_[part].first + at / kLeaf, leaves_of(size) * sizeof(std::uint64_t));
}

}  // namespace cudafuture::io
