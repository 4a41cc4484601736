// One request to the kernel, and the buffer that it may be staged in. An engine has as many as its queue is deep.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/future.h"

namespace cudafuture::storage {

class Operation;

enum class Direction : std::uint8_t { read, write };

struct Block {
  static constexpr std::size_t kMostPieces = 64;
  static constexpr std::size_t kLong = 64 * 1024;  // bytes: staging or checking them takes longer than a kernel call

  // ---- what the kernel is asked for
  Direction direction = Direction::read;
  int descriptor = -1;
  std::uint64_t offset = 0;  // in the file, bytes
  std::size_t size = 0;      // bytes
  std::array<iovec, kMostPieces> pieces;
  std::size_t first = 0;  // of the pieces that are left
  std::size_t count = 0;
  std::int64_t result = 0;  // bytes, or a negative errno

  // ---- what for
  Operation* operation = nullptr;
  std::size_t at = 0;         // place in the operation's memory
  std::size_t wanted = 0;     // bytes of that
  std::size_t ahead = 0;      // bytes before them that are read along
  std::size_t done = 0;       // bytes of both that have gone over
  bool is_staged = false;     // they go by the buffer
  bool is_unchecked = false;  // their checksum is to be taken beside the kernel's work; see Operation::check()
  bool was_refused = false;   // past the cache; now it is tried through it
  unsigned in_vain = 0;       // results, one after the other, that have brought nothing

  // ---- for the engine
  std::byte* buffer = nullptr;
  std::size_t buffer_size = 0;
  at::Tensor pinned;          // the buffer, where devices can reach it
  bool is_of_device = false;  // its operation's
  bool is_with_copier = false;
  FuturePtr copied;  // done; its events say when devices have done with the buffer
  Block* next = nullptr;

  // Asks for what is left when so many bytes more have gone over.
  void advance(std::size_t bytes) noexcept {
    offset += bytes;
    size -= bytes;
    done += bytes;
    while (bytes > 0) {
      iovec& piece = pieces[first];
      const std::size_t part = bytes < piece.iov_len ? bytes : piece.iov_len;
      piece.iov_base = static_cast<std::byte*>(piece.iov_base) + part;
      piece.iov_len -= part;
      bytes -= part;
      if (piece.iov_len == 0) ++first, --count;
    }
  }
};

}  // namespace cudafuture::storage
