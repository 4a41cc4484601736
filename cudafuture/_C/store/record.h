// A record of the journal: a written or deleted key.
//
// It is stored as the size of the body, the hash of the body, and the body. So each record can be verified even if
// others are damaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "io/checksum.h"
#include "store/entry.h"

namespace cudafuture::store {

struct Record {
  std::string key;
  std::uint64_t sequence = 0;
  bool is_deletion = false;
  // ---- for a written key
  io::Shape shape;
  std::uint64_t size = 0;
  std::uint64_t slab = 0;
  std::uint64_t offset = 0;
  std::uint64_t digest = 0;
  bool has_digest = false;
  std::uint64_t seed = 0;

  bool is_link() const noexcept { return seed != io::hash_of(key); }
};
Record record_of(const std::string& key, std::uint64_t sequence, const Entry& entry);
Record deletion_of(const std::string& key, std::uint64_t sequence);

void append_record(std::string& bytes, const Record& record);

constexpr std::size_t kLongestKey = 1024;  // bytes
constexpr int kMostDims = 1024;            // of a tensor

// Removes the record at the beginning of `bytes` and returns it; none if there is no valid record.
std::optional<Record> take_record(std::string_view& bytes);

std::uint64_t size_of_deletion(const std::string& key) noexcept;  // bytes of its record
std::uint64_t size_of(const Record& record) noexcept;             // bytes

}  // namespace cudafuture::store
