// Buffer pool: allocation without blocking, for threads that must not wait.
#include "io/buffer_pool.h"

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "io/aligned.h"
#include "io/page.h"
#include "rules.h"

using cudafuture::Foreign;
using cudafuture::Future;
using cudafuture::io::BufferPool;
using cudafuture::io::BufferPoolAllocator;
using cudafuture::io::kPage;
using cudafuture::io::make_aligned_bytes;

namespace {

constexpr std::uint64_t kPages = 4;

std::shared_ptr<BufferPool> make_pool() {
  return std::make_shared<BufferPool>(make_aligned_bytes(kPages * kPage), false);
}

bool is_aligned(const c10::DataPtr& memory) { return reinterpret_cast<std::uintptr_t>(memory.get()) % kPage == 0; }

}  // namespace

TEST_CASE("buffer pool: an exhausted pool allocates aligned memory outside and counts it") {
  const auto pool = make_pool();
  BufferPoolAllocator allocator(pool);
  c10::DataPtr most = allocator.allocate(3 * kPage - 10);
  CHECK(is_aligned(most));
  CHECK(pool->free() == kPage);
  CHECK(pool->outside() == 0);
  const c10::DataPtr outside = allocator.allocate(kPage + 1);
  CHECK(is_aligned(outside));
  CHECK(pool->free() == kPage);
  CHECK(pool->outside() == kPage + 1);
  most.clear();
  CHECK(pool->free() == kPages * kPage);
  const c10::DataPtr all = allocator.allocate(kPages * kPage);
  CHECK(pool->free() == 0);
  CHECK(pool->outside() == kPage + 1);
}

TEST_CASE("buffer pool: an allocation without waiting takes no memory ahead of waiting requests") {
  const auto pool = make_pool();
  c10::DataPtr half = pool->allocate(2 * kPage);
  const auto waiting = c10::make_intrusive<Future>();
  const auto loan = std::make_shared<BufferPool::Loan>();
  pool->take({3 * kPage, loan, Foreign(), waiting});
  CHECK_FALSE(waiting->done());
  const c10::DataPtr small = pool->allocate(kPage);
  CHECK(pool->outside() == kPage);
  half.clear();
  CHECK(waiting->done());
  CHECK(pool->free() == kPage);
}

TEST_CASE("buffer pool: memory outlives its pool, and a closed pool allocates outside the pool") {
  auto pool = make_pool();
  const c10::DataPtr memory = pool->allocate(kPage);
  pool->close();
  const c10::DataPtr outside = pool->allocate(kPage);
  CHECK(pool->outside() == kPage);
  pool.reset();
  static_cast<std::uint8_t*>(memory.get())[kPage - 1] = 1;
  static_cast<std::uint8_t*>(outside.get())[kPage - 1] = 1;
}

TEST_CASE("buffer pool: when threads allocate and free, no memory is lost or lent twice") {
  const auto pool = make_pool();
  std::vector<std::thread> threads;
  for (std::uint8_t mine = 1; mine <= 4; ++mine) {
    threads.emplace_back([&pool, mine] {
      for (int round = 0; round < 200; ++round) {
        const c10::DataPtr memory = pool->allocate(2 * kPage);
        auto* const bytes = static_cast<std::uint8_t*>(memory.get());
        bytes[0] = bytes[2 * kPage - 1] = mine;
        std::this_thread::yield();
        CHECK(bytes[0] == mine);
        CHECK(bytes[2 * kPage - 1] == mine);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool->free() == kPages * kPage);
}
