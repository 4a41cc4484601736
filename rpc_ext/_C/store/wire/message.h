// The messages between a client and a store service: their format, and how they are written.
//
//     request  version, verb | token, time of sending, oldest sequence number | name of the service | entries | data
//     entry    sequence, after, expiry, key                        of every verb but FETCH
//              + whether a digest is needed                        GET
//              + dtype, sizes, part, place of the bytes, digest    PUT
//              sequence, part                                      FETCH
//     answer   version, entries, errors | each error: index, kind, numbers, message, path | entries | data
//     entry    dtype, sizes, place of the bytes, digests           GET
//              place of the bytes, digest                          FETCH
//
// The receiver of bytes verifies them. An answer to GET has the digest that the store keeps of the tensor, so the
// service need not hash the bytes. A client that receives other bytes asks once more, and says that it needs digests.
// They are those of the bytes that the service has read, so they tell damage on the way from damage on the disk.
//
// The data of a message are the bytes of its tensors, one after the other: up to 16 KiB at the end of the message
// itself, more as one tensor beside it. Nothing of a message is unpickled.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/error.h"

namespace rpc_ext::store {

using cudafuture::api::Problem;

inline constexpr std::size_t kPart = 16 << 20;     // bytes of the data of one message; larger tensors travel in parts
inline constexpr std::size_t kPack = 4 << 20;      // most bytes of small tensors in one message
inline constexpr std::size_t kLarge = 1 << 20;     // bytes from which on a tensor is sent alone
inline constexpr std::size_t kMostEntries = 1024;  // of one message
inline constexpr std::size_t kLongestKey = 1000;   // bytes of UTF-8
inline constexpr std::size_t kToken = 16;          // bytes of the token by which a client names its session
inline constexpr std::size_t kLine = 64;           // bytes: tensors of one message begin at a multiple
inline constexpr std::size_t kInline = 1 << 14;    // bytes of data that a message carries itself
inline constexpr std::size_t kMostDimensions = 64;
inline constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;
inline constexpr std::uint8_t kVersion = 5;

enum class Verb : std::uint8_t { put = 1, get, erase, fetch, abandon };

// Returns the reason why a text of UTF-8 is no key; none: it is one.
std::optional<std::string> key_fault(std::string_view key);

// The dtypes by code: append only.
const std::vector<c10::ScalarType>& dtypes();

// One operation of a request. Every verb but FETCH has the first fields; FETCH has the sequence and the part.
struct KeyEntry {
  std::uint64_t sequence = 0;  // number of the client's operation
  std::uint64_t after = 0;     // number of the operation on the same key that takes effect before this one; 0: none
  double expires = 0;          // on the client's monotonic clock; 0: never
  std::string key;
  // ---- of GET
  bool needs_digest = false;  // of the bytes that are sent, also where the store keeps one
  // ---- of PUT
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<std::int64_t> sizes;
  std::uint64_t nbytes = 0;  // of the whole tensor
  std::uint32_t part = 0;
  std::uint32_t at = 0;  // begin of the part's bytes in the data
  std::uint32_t length = 0;
  std::uint64_t digest = 0;  // of the part's bytes

  bool is_part() const noexcept { return nbytes > kPart; }
};

struct StoreRequest {
  Verb verb = Verb::get;
  std::string token;
  double sent = 0;           // on the client's monotonic clock
  std::uint64_t oldest = 0;  // the lowest sequence number of an operation that is not done at the client
  std::string service;
  std::vector<KeyEntry> entries;
  at::Tensor data;
};

// An entry of the answer to GET, or to FETCH, which has the place and the digest alone.
struct Found {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  std::vector<std::int64_t> sizes;
  std::uint64_t nbytes = 0;
  std::uint32_t at = 0;
  std::uint32_t length = 0;  // bytes of the first part in the data; 0 of a tensor with bytes: FETCH sends them
  std::optional<std::uint64_t> digest;  // of those bytes; none: the store keeps that of the tensor
  bool has_kept = false;                // the digest of the whole tensor that the store keeps, and its seed
  std::uint64_t kept = 0;
  std::uint64_t seed = 0;
};

using Errors = std::vector<std::pair<std::size_t, Problem>>;  // by index of the entry

struct Answer {
  Errors errors;
  std::vector<Found> entries;  // of the entries without an error
  at::Tensor data;
};

struct Packed {
  std::vector<char> body;
  std::vector<at::Tensor> tensors;
};

std::uint32_t parts_of(std::uint64_t nbytes) noexcept;
std::uint64_t part_length(std::uint64_t nbytes, std::uint32_t part) noexcept;  // bytes of a part of a tensor
std::uint64_t next_line(std::uint64_t end) noexcept;                           // where the next tensor begins
at::Tensor bytes_of(std::size_t size);                                         // not initialized
at::Tensor no_data();

// Returns a part of a tensor of bytes on the host as a tensor whose storage holds only the part: torch's RPC copies a
// tensor that is only a part of its storage. The result keeps the whole.
at::Tensor alone(const at::Tensor& data, std::int64_t at, std::int64_t length);

Packed pack_request(const StoreRequest& request);

// `header` begins the body. The entries are those of the verb; other verbs than GET and FETCH have none.
Packed pack_answer(std::string_view header, std::size_t count, const Errors& errors, Verb verb,
                   const std::vector<Found>& entries, const at::Tensor& data);

}  // namespace rpc_ext::store
