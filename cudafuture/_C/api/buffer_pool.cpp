#include "api/buffer_pool.h"

#include <mutex>
#include <utility>

#include "api/thread.h"
#include "core/error.h"
#include "io/aligned.h"
#include "io/buffer_pool.h"
#include "io/page.h"
#include "store/function_continuation.h"

namespace cudafuture::api {
namespace {

// A request to a pool, with a flag for whether the call that made it has returned.
struct Taking {
  std::mutex mutex;
  bool has_returned = false;
  bool is_served = false;
};

class NativePool final : public BufferPool {
 public:
  explicit NativePool(std::shared_ptr<io::BufferPool> pool) : pool_(std::move(pool)) {}
  ~NativePool() override { pool_->close(); }
  NativePool(const NativePool&) = delete;
  NativePool& operator=(const NativePool&) = delete;

  std::function<void()> take(std::uint64_t size, Taken taken) override {
    const auto loan = std::make_shared<io::BufferPool::Loan>();
    const auto future = c10::make_intrusive<Future>();
    const auto taking = std::make_shared<Taking>();
    // A buffer that returns serves the next request inside a destructor, which may hold any lock.
    store::then(future, [loan, taking, taken](Future& done) {
      done.mark_seen();
      std::unique_lock lock(taking->mutex);
      taking->is_served = true;
      if (!taking->has_returned) return;
      lock.unlock();
      call_elsewhere([loan, taken] { taken(std::move(loan->tensor)); });
    });
    try {
      pool_->take({size, loan, {}, future});
    } catch (const Error&) {  // the pool is closed
      future->fail(Value::of_error(std::current_exception()));
    }
    bool is_served = false;
    {
      const std::lock_guard lock(taking->mutex);
      is_served = taking->is_served;
      taking->has_returned = true;
    }
    if (!is_served) return [future] { future->cancel(); };
    taken(std::move(loan->tensor));
    return {};
  }

  void close() noexcept override { pool_->close(); }

 private:
  const std::shared_ptr<io::BufferPool> pool_;
};

}  // namespace

std::shared_ptr<BufferPool> make_buffer_pool(std::uint64_t nbytes) {
  const at::Tensor arena = io::make_aligned_bytes((nbytes + io::kPage - 1) / io::kPage * io::kPage);
  return std::make_shared<NativePool>(std::make_shared<io::BufferPool>(arena, /*is_pinned=*/false));
}

}  // namespace cudafuture::api
