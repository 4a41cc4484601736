// The user's memory of one read or write: pieces that are treated as one run of bytes.
//
// A piece is contiguous, strided, or dense on a device. The elements of a strided piece are in the order of their
// indices, the last index fastest, like `tensor.contiguous()`.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace cudafuture::io {

class Memory {
 public:
  void add(void* data, std::size_t size);
  // `sizes` and `strides` are in elements of `item` bytes; strides may be 0 or negative.
  void add_strided(void* data, std::size_t item, const std::int64_t* sizes, const std::int64_t* strides,
                   std::size_t dims);

  void add_on_device(at::Tensor bytes);  // one-dimensional and dense
  void add(Memory&& more);
  void reserve(std::size_t pieces) { pieces_.reserve(pieces); }
  void skip(std::size_t size);  // a write writes zeros; a read drops the bytes

  std::size_t size() const noexcept { return size_; }                  // bytes
  bool is_on_device(std::size_t at, std::size_t size) const noexcept;  // true if any of those bytes is

  // Stores the bytes from `at` on, at most `size`, as iovecs of contiguous memory. Returns their number, or 0 if there
  // would be more than `most`, or if the bytes are not contiguous or are on a device.
  std::size_t pieces(std::size_t at, std::size_t size, iovec* into, std::size_t most) const noexcept;

  void gather(std::size_t at, std::size_t size, std::byte* into) const noexcept;
  void scatter(std::size_t at, std::size_t size, const std::byte* from) const noexcept;

  // Do the same between memory that may be on devices and a pinned tensor of bytes. Copies of device memory are
  // enqueued on the devices' current streams. Throw a device's error.
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
    c10::SmallVector<Dim, 0> outer;  // dimensions outside the runs; empty: contiguous
    at::Tensor on_device;            // if set, `data` is null; `data` is also null for skipped bytes
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

}  // namespace cudafuture::io
