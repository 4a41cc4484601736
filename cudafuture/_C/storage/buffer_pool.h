// A fixed amount of host memory, lent in parts. A part is a tensor; its memory returns when the tensor's storage dies.
//
// The bookkeeping is native: a signal handler of the embedding language cannot interrupt it. Requests are served in
// their order. A part of pinned memory may be the source or the target of a copy that a program has started by itself.
// So an event is recorded on the current stream of each device when the part returns, and the memory is lent again when
// the devices have reached these events.
//
// Lock: mutex_ guards the free runs and the requests. Under it nothing is completed or dropped.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "core/event_set.h"
#include "core/foreign.h"
#include "core/future.h"
#include "storage/extents.h"

namespace cudafuture::storage {

class BufferPool final : public std::enable_shared_from_this<BufferPool> {
 public:
  // The memory of a request, set before its future completes. It is shared, so a thread of the core can drop it without
  // the interpreter.
  struct Loan : std::enable_shared_from_this<Loan> {
    at::Tensor tensor;
  };

  struct Request {
    std::uint64_t size;  // bytes
    std::shared_ptr<Loan> loan;
    Foreign value;  // of the future
    FuturePtr future;
  };

  // The memory of a contiguous tensor of bytes, which begins at a page and has whole pages.
  BufferPool(const at::Tensor& arena, bool is_pinned);

  void take(Request&& request);  // throws when the pool is closed

  // Allocates at once, for threads that must not wait. What the pool has no room for is allocated outside of it, as
  // well aligned, and counted.
  c10::DataPtr allocate(std::uint64_t size);

  std::uint64_t free() const;  // bytes
  void close() noexcept;       // fails the requests that wait

  // Bytes that have been allocated outside of the pool so far.
  std::uint64_t outside() const noexcept { return outside_.load(std::memory_order_relaxed); }

 private:
  class Canceller;
  class Return;
  struct Lease;

  // Where callbacks of Python may run that are inline: not in a destructor, which may be in the middle of anything.
  enum class Caller : std::uint8_t { function, destructor };

  // Null where no run is so long, where requests wait, which come first, and in a closed pool.
  c10::DataPtr try_take(std::uint64_t size);
  // Lends to the requests that wait, as far as there is memory.
  void serve(Caller caller) noexcept;
  at::Tensor part(std::uint64_t place, std::uint64_t size);
  void lend(Request&& request, std::uint64_t place, Caller caller) noexcept;
  void returned(std::uint64_t place, std::uint64_t size) noexcept;
  void give_back(std::uint64_t place, std::uint64_t size) noexcept;

  const c10::Storage memory_;  // not the tensor: Python has seen that, and its last owner would need the GIL
  std::byte* const data_;
  const bool is_pinned_;
  mutable std::mutex mutex_;
  Extents free_;
  std::deque<Request> waiting_;
  bool is_serving_ = false;
  bool is_closed_ = false;
  std::atomic<std::uint64_t> outside_ = 0;
};

// A pool as one of torch's allocators.
class BufferPoolAllocator final : public c10::Allocator {
 public:
  explicit BufferPoolAllocator(std::shared_ptr<BufferPool> pool) noexcept : pool_(std::move(pool)) {}
  c10::DataPtr allocate(std::size_t size) override { return pool_->allocate(size); }
  void copy_data(void* to, const void* from, std::size_t size) const override;

 private:
  const std::shared_ptr<BufferPool> pool_;
};

}  // namespace cudafuture::storage
