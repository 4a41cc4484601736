// The user's memory of one read or write: pieces that are taken as one run of bytes.
//
// A piece is contiguous, or strided: then its elements count in the order of its indices, the last one fastest, as
// `tensor.contiguous()` would lay them out. Or it is on a device, and dense.
#pragma once

#include <ATen/core/Tensor.h>
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

  void add_on_device(at::Tensor bytes);  // of one dimension, dense
  void add(Memory&& more);
  void reserve(std::size_t pieces) { pieces_.reserve(pieces); }
  void skip(std::size_t size);  // zeros to be written; read, and dropped

  std::size_t size() const noexcept { return size_; }                  // bytes
  bool is_on_device(std::size_t at, std::size_t size) const noexcept;  // any of those bytes

  // The bytes from `at` on, at most `size`, as iovecs of contiguous memory: how many there are, or 0 when they are more
  // than `most`, not contiguous, or on a device.
  std::size_t pieces(std::size_t at, std::size_t size, iovec* into, std::size_t most) const noexcept;

  void gather(std::size_t at, std::size_t size, std::byte* into) const noexcept;
  void scatter(std::size_t at, std::size_t size, const std::byte* from) const noexcept;

  // The same between memory that may be on devices and a pinned tensor of bytes: what is on devices is enqueued on
  // their current streams. Throw what a device has to say.
  void gather(std::size_t at, std::size_t size, const at::Tensor& into) const;
  void scatter(std::size_t at, std::size_t size, const at::Tensor& from) const;

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
    at::Tensor on_device;            // then there is no data; nor where bytes are skipped
  };

  template <class Visit>
  void visit(std::size_t at, std::size_t size, Visit&& visit) const;
  template <class Copy>
  static void walk(const Piece& piece, std::size_t at, std::size_t size, Copy&& copy) noexcept;
  template <class Copy>
  static void walk_strided(const Piece& piece, std::size_t at, std::size_t size, Copy&& copy) noexcept;
  std::size_t find(std::size_t at) const noexcept;

  c10::SmallVector<Piece, 1> pieces_;
  std::size_t size_ = 0;
};

}  // namespace cudafuture::storage
