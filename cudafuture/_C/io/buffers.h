// The memory of an engine's staging buffers: ordinary host memory, pinned once a device first needs it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace cudafuture::io {

class Buffers {
 public:
  explicit Buffers(std::size_t bytes);  // throws std::bad_alloc
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  std::byte* data() const noexcept { return data_; }  // at a page
  std::size_t size() const noexcept { return size_; }

  // Replaces the memory with pinned memory of the accelerator. Throws the error of its allocator.
  void pin();
  bool are_pinned() const noexcept { return pinned_.defined(); }
  const at::Tensor& pinned() const noexcept { return pinned_; }  // the same bytes

 private:
  void release() noexcept;

  std::byte* data_;
  std::size_t size_;
  at::Tensor pinned_;
};

}  // namespace cudafuture::io
