// A request to the kernel, and the buffer that it may be staged in. An engine has as many blocks as its queue depth.
#pragma once

#include <ATen/core/Tensor.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/future.h"

namespace cudafuture::io {

class Operation;

enum class Direction : std::uint8_t { read, write };

struct Block {
  static constexpr std::size_t kMostPieces = 64;
  static constexpr std::size_t kLong = 64 * 1024;  // bytes: staging or a checksum of more outlasts a system call

  // ---- the request to the kernel
  Direction direction = Direction::read;
  int descriptor = -1;
  std::uint64_t offset = 0;  // in the file, bytes
  std::size_t size = 0;      // bytes
  std::array<iovec, kMostPieces> pieces;
  std::size_t first = 0;  // of the remaining pieces
  std::size_t count = 0;
  std::int64_t result = 0;  // bytes, or a negative errno

  // ---- its purpose
  Operation* operation = nullptr;
  std::size_t at = 0;         // place in the operation's memory
  std::size_t wanted = 0;     // bytes of that memory
  std::size_t ahead = 0;      // extra bytes that are read before them
  std::size_t done = 0;       // bytes of both that were transferred
  bool is_staged = false;     // the bytes go through the buffer
  bool is_unchecked = false;  // the checksum is taken during the kernel's work; see Operation::check()
  bool was_refused = false;   // direct I/O was refused; the block is retried through the page cache
  unsigned in_vain = 0;       // consecutive results that transferred nothing

  // ---- engine state
  std::byte* buffer = nullptr;
  std::size_t buffer_size = 0;
  at::Tensor pinned;          // the buffer, if devices can reach it
  bool is_of_device = false;  // its operation uses devices
  bool is_with_copier = false;
  FuturePtr copied;  // done; its events mark the devices' last use of the buffer
  Block* next = nullptr;

  // Requests the remaining bytes after `bytes` more were transferred.
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

}  // namespace cudafuture::io
