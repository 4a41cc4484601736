// Host memory of a fixed size, lent in parts; see BufferPool of cudafuture.io.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "api/export.h"

namespace cudafuture::api {

// The memory returns to the pool when the last tensor that uses it is dropped.
class CUDAFUTURE_API BufferPool {
 public:
  // `tensor` is undefined if the pool was closed or the request was cancelled.
  using Taken = std::function<void(at::Tensor tensor)>;

  virtual ~BufferPool() = default;  // closes it

  // Calls `taken` with a tensor of bytes, immediately if there is room. Otherwise the request waits, and the returned
  // function cancels it; then `taken` is called on a thread that may block.
  virtual std::function<void()> take(std::uint64_t size, Taken taken) = 0;
  virtual void close() noexcept = 0;  // fails the requests that wait, and later ones
};

CUDAFUTURE_API std::shared_ptr<BufferPool> make_buffer_pool(std::uint64_t nbytes);  // not pinned

}  // namespace cudafuture::api
