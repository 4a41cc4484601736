#include "io/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <cstring>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/process.h"
#include "core/stream_pool.h"
#include "core/sync_edge.h"
#include "core/watcher.h"
#include "io/aligned.h"
#include "io/page.h"
#include "io/watch.h"

namespace cudafuture::io {
namespace {

std::uint64_t pages(std::uint64_t size) noexcept { return (size + kPage - 1) / kPage * kPage; }

// Returns events for the pending work of this thread's current streams. It skips a stream that is being captured,
// because the host cannot wait for it, and a device that has failed, because it has no more work.
EventSet pending_work() noexcept {
  std::vector<EventSet> sets;
  std::vector<const EventSet*> pending;
  if (!stands(SyncEdge::io_buffer_record)) return {};
  try {
    for (const c10::Device device : all_devices_with_streams()) {
      if (!has_context(device)) continue;
      try {
        EventSet set = EventSet::record(device);
        if (!set.is_captured() && !set.query()) sets.push_back(std::move(set));
      } catch (...) {
      }
    }
    for (const EventSet& set : sets) pending.push_back(&set);
    return EventSet::join(pending, 0);
  } catch (...) {
    return {};
  }
}

}  // namespace

// Serves the waiting requests behind one that is cancelled.
class BufferPool::Canceller final : public Producer {
 public:
  explicit Canceller(std::weak_ptr<BufferPool> pool) noexcept : pool_(std::move(pool)) {}
  void finished(Future& future) noexcept override {
    if (future.state() != State::cancelled) return;
    if (const std::shared_ptr<BufferPool> pool = pool_.lock()) pool->serve(Caller::function);
  }

 private:
  std::weak_ptr<BufferPool> pool_;
};

// Returns memory when the devices have finished with it.
class BufferPool::Return final : public Continuation {
 public:
  Return(std::shared_ptr<BufferPool> pool, std::uint64_t offset, std::uint64_t size, FuturePtr work) noexcept
      : pool_(std::move(pool)), offset_(offset), size_(size) {
    parent = std::move(work);
  }

  void watch() noexcept {
    if (!Watcher::get().try_watch(this)) abandon();
  }
  void run(Future&) noexcept override {
    pool_->release(offset_, size_);
    delete this;
  }
  void abandon() noexcept override {
    const std::unique_ptr<Return> self(this);
    if (is_shut_down()) return;  // no request is served any more
    synchronize(*parent);
    pool_->release(offset_, size_);
  }

 private:
  std::shared_ptr<BufferPool> pool_;
  std::uint64_t offset_;
  std::uint64_t size_;
};

// The owner of memory that allocate() lent.
struct BufferPool::Lease {
  std::shared_ptr<BufferPool> pool;
  std::uint64_t offset;
  std::uint64_t size;

  static void end(void* context) {
    const std::unique_ptr<Lease> lease(static_cast<Lease*>(context));
    lease->pool->returned(lease->offset, lease->size);
  }
};

BufferPool::BufferPool(const at::Tensor& arena, bool is_pinned)
    : memory_(arena.storage()),
      data_(static_cast<std::byte*>(arena.data_ptr())),
      is_pinned_(is_pinned),
      free_(arena.nbytes()) {}

void BufferPool::take(LoanRequest&& request) {
  request.future->set_producer(std::make_shared<Canceller>(weak_from_this()));
  {
    std::lock_guard lock(mutex_);
    if (is_closed_) throw Error(ErrorKind::invalid_state, "the pool is closed");
    waiting_.push_back(std::move(request));
  }
  serve(Caller::function);
}

c10::DataPtr BufferPool::allocate(std::uint64_t size) {
  c10::DataPtr memory = try_take(size);
  if (memory) return memory;
  memory = aligned_allocator().allocate(size);
  outside_.fetch_add(size, std::memory_order_relaxed);
  return memory;
}

c10::DataPtr BufferPool::try_take(std::uint64_t size) {
  auto lease = std::make_unique<Lease>(Lease{shared_from_this(), 0, pages(size)});
  {
    std::lock_guard lock(mutex_);
    if (is_closed_ || !waiting_.empty() || size == 0) return {};
    const std::optional<std::uint64_t> offset = free_.take(lease->size);
    if (!offset) return {};
    lease->offset = *offset;
  }
  void* const memory = data_ + lease->offset;
  return {memory, lease.release(), &Lease::end, c10::Device(c10::kCPU)};
}

void BufferPool::serve(Caller caller) noexcept {
  const std::shared_ptr<BufferPool> alive = shared_from_this();
  bool is_first = true;
  while (true) {
    std::optional<LoanRequest> request;
    std::optional<std::uint64_t> offset;
    {
      std::lock_guard lock(mutex_);
      if (is_first && is_serving_) return;  // the serving caller sees the change
      is_first = false;
      is_serving_ = !waiting_.empty();
      if (!is_serving_) return;
      LoanRequest& next = waiting_.front();
      if (!next.future->done()) {  // otherwise it was cancelled
        offset = next.size == 0 ? 0 : free_.take(pages(next.size));
        is_serving_ = offset.has_value();
        if (!is_serving_) return;
      }
      request = std::move(next);
      waiting_.pop_front();
    }
    if (offset) lend(std::move(*request), *offset, caller);
  }
}

void BufferPool::lend(LoanRequest&& taken, std::uint64_t offset, Caller caller) noexcept {
  LoanRequest request = std::move(taken);  // dropped last, inside the interpreter if this thread is there
  std::exception_ptr error;
  try {
    request.loan->tensor = part(offset, request.size);
  } catch (...) {
    error = std::current_exception();
    release(offset, pages(request.size));
  }
  request.loan = nullptr;  // from here on the tensor is the user's, and may be freed only in a thread of theirs
  const ForeignRuntime& runtime = foreign_runtime();
  void* const state = caller == Caller::destructor ? runtime.step_out() : nullptr;
  if (error == nullptr) {
    request.future->complete(Value::of_object(std::move(request.value)));
  } else {
    request.future->fail(Value::of_error(std::move(error)));
  }
  if (state != nullptr) runtime.step_in(state);
}

at::Tensor BufferPool::part(std::uint64_t offset, std::uint64_t size) {
  const c10::InferenceMode plain(false);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(c10::kCPU);
  if (size == 0) return at::empty({0}, options);
  const auto done = [pool = shared_from_this(), offset, size](void*) { pool->returned(offset, pages(size)); };
  return at::from_blob(data_ + offset, {static_cast<std::int64_t>(size)}, done, options);
}

void BufferPool::returned(std::uint64_t offset, std::uint64_t size) noexcept {
  if (is_forked_child()) return;  // a parent's thread that does not exist here may hold the lock
  if (is_pinned_ && !is_shut_down()) {
    EventSet events = pending_work();
    if (!events.empty()) {
      auto work = c10::make_intrusive<Future>();
      work->complete(Value(), std::move(events));
      (new Return(shared_from_this(), offset, size, std::move(work)))->watch();
      return;
    }
  }
  release(offset, size);
}

void BufferPool::release(std::uint64_t offset, std::uint64_t size) noexcept {
  if (size == 0) return;
  {
    std::lock_guard lock(mutex_);
    free_.release(offset, size);
  }
  if (!is_shut_down()) serve(Caller::destructor);
}

std::uint64_t BufferPool::free() const {
  std::lock_guard lock(mutex_);
  return free_.free();
}

void BufferPool::close() noexcept {
  std::deque<LoanRequest> waiting;
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    waiting.swap(waiting_);
  }
  for (const LoanRequest& request : waiting) {
    request.future->fail(
        Value::of_error(std::make_exception_ptr(Error(ErrorKind::invalid_state, "the pool was closed"))));
  }
}

void BufferPoolAllocator::copy_data(void* to, const void* from, std::size_t size) const { std::memcpy(to, from, size); }

}  // namespace cudafuture::io
