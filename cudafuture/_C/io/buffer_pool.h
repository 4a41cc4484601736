// A fixed amount of host memory, lent in parts. A part is a tensor; its memory returns when the tensor's storage is
// freed.
//
// The bookkeeping is native, so a signal handler of the embedding language cannot interrupt it. Requests are served in
// order. The program may have started a copy from or to a part of pinned memory. So when the part returns, an event is
// recorded on the current stream of each device. The memory is lent again when the devices have reached these events.
//
// Lock: mutex_ guards the free runs and the requests. No future is completed and nothing is dropped under it.
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
#include "io/free_space.h"

namespace cudafuture::io {

class BufferPool final : public std::enable_shared_from_this<BufferPool> {
 public:
  // The memory of a request, set before its future completes. It is shared, so that a thread of the core can drop it
  // without the interpreter.
  struct Loan : std::enable_shared_from_this<Loan> {
    at::Tensor tensor;
  };

  struct LoanRequest {
    std::uint64_t size;  // bytes
    std::shared_ptr<Loan> loan;
    Foreign value;  // the future's value
    FuturePtr future;
  };

  // `arena`: a contiguous tensor of bytes, which begins at a page and consists of whole pages.
  BufferPool(const at::Tensor& arena, bool is_pinned);

  void take(LoanRequest&& request);  // throws if the pool is closed

  // Allocates without blocking, for threads that must not wait. If the pool has no room, it allocates outside the pool,
  // with the same alignment, and counts the bytes.
  c10::DataPtr allocate(std::uint64_t size);

  std::uint64_t free() const;  // bytes
  void close() noexcept;       // fails the waiting requests

  // Bytes allocated outside the pool so far.
  std::uint64_t outside() const noexcept { return outside_.load(std::memory_order_relaxed); }

 private:
  class Canceller;
  class Return;
  struct Lease;

  // Decides whether inline Python callbacks may run: not in a destructor, which can run at any point of a program.
  enum class Caller : std::uint8_t { function, destructor };

  // Null if no free run is long enough, if requests are waiting (they come first), or if the pool is closed.
  c10::DataPtr try_take(std::uint64_t size);
  // Serves waiting requests as far as there is memory.
  void serve(Caller caller) noexcept;
  at::Tensor part(std::uint64_t offset, std::uint64_t size);
  void lend(LoanRequest&& request, std::uint64_t offset, Caller caller) noexcept;
  void returned(std::uint64_t offset, std::uint64_t size) noexcept;
  void release(std::uint64_t offset, std::uint64_t size) noexcept;

  const c10::Storage memory_;  // not the tensor: Python has seen it, so its last owner would need the GIL
  std::byte* const data_;
  const bool is_pinned_;
  mutable std::mutex mutex_;
  FreeSpace free_;
  std::deque<LoanRequest> waiting_;
  bool is_serving_ = false;
  bool is_closed_ = false;
  std::atomic<std::uint64_t> outside_ = 0;
};

// An allocator of torch that uses a pool.
class BufferPoolAllocator final : public c10::Allocator {
 public:
  explicit BufferPoolAllocator(std::shared_ptr<BufferPool> pool) noexcept : pool_(std::move(pool)) {}
  c10::DataPtr allocate(std::size_t size) override { return pool_->allocate(size); }
  void copy_data(void* to, const void* from, std::size_t size) const override;

 private:
  const std::shared_ptr<BufferPool> pool_;
};

}  // namespace cudafuture::io
