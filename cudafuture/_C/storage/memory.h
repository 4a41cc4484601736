// The user's memory of one read or write: pieces that are taken as one run of bytes.
//
// A piece is contiguous, or strided: then its elements count in the order of its indices, the last one fastest, as
// `tensor.contiguous()` would lay them out.
#pragma once

#include <c10/util/SmallVector.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace cudafuture::storage {

class Memory {
 public:
  void add(void* data, std::size_t size);
  // Strides and sizes in elements of `item` bytes; strides may be 0 or negative.
  void add_strided(void* data, std::size_t item, const std::int64_t* sizes, const std::int64_t* strides,
                   std::size_t dims);

  std::size_t size() const noexcept { return size_; }  // bytes

  // The bytes from `at` on, at most `size`, as iovecs of contiguous memory: how many there are, or 0 when they are more
  // than `most` or not contiguous.
  std::size_t pieces(std::size_t at, std::size_t size, iovec* into, std::size_t most) const noexcept;

  void gather(std::size_t at, std::size_t size, std::byte* into) const noexcept;
  void scatter(std::size_t at, std::size_t size, const std::byte* from) const noexcept;

 private:
  struct Dim {
    std::size_t size;
    std::ptrdiff_t stride;  // bytes
  };
  struct Piece {
    std::byte* data;
    std::size_t begin;               // in the run
    std::size_t size;                // bytes
    std::size_t run;                 // bytes of its innermost contiguous runs
    c10::SmallVector<Dim, 0> outer;  // those outside the runs; empty: contiguous
  };

  template <class Copy>
  void walk(std::size_t at, std::size_t size, Copy&& copy) const noexcept;
  template <class Copy>
  static void walk_strided(const Piece& piece, std::size_t at, std::size_t size, Copy&& copy) noexcept;
  std::size_t find(std::size_t at) const noexcept;

  c10::SmallVector<Piece, 1> pieces_;
  std::size_t size_ = 0;
};

}  // namespace cudafuture::storage
