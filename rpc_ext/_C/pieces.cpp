#include "pieces.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

namespace rpc_ext {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;
constexpr std::int64_t kSmall = 1 << 16;  // bytes below which a block is not worth it

void* new_block(std::size_t size) {
  const std::size_t whole = (size + kHugePage - 1) / kHugePage * kHugePage;
  void* block = std::aligned_alloc(kHugePage, whole);
  if (block == nullptr) throw std::bad_alloc();
  madvise(block, whole, MADV_HUGEPAGE);  // where the kernel has none, ordinary pages do
  return block;
}

}  // namespace

Pieces::~Pieces() {
  for (void* block : free_) std::free(block);
}

at::Tensor Pieces::take(std::int64_t nbytes) {
  if (nbytes < 0) throw std::invalid_argument("a number of bytes is not negative");
  if (nbytes < kSmall || nbytes > static_cast<std::int64_t>(size_)) return at::empty({nbytes}, at::kByte);
  return at::from_blob(get(), {nbytes}, [self = shared_from_this()](void* used) { self->give_back(used); }, at::kByte);
}

struct Pieces::Lease {
  std::shared_ptr<Pieces> pieces;
  void* block;

  static void end(void* lease) {
    const std::unique_ptr<Lease> self(static_cast<Lease*>(lease));
    self->pieces->give_back(self->block);
  }
};

c10::DataPtr Pieces::receive(std::size_t nbytes) {
  if (nbytes > size_ || nbytes < size_ / 4 * 3) return {};
  auto lease = std::make_unique<Lease>(Lease{shared_from_this(), get()});
  void* block = lease->block;
  return {block, lease.release(), &Lease::end, c10::kCPU};
}

void* Pieces::get() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      void* block = free_.back();  // the one used last: what of it is in a cache is of use
      free_.pop_back();
      return block;
    }
  }
  return new_block(size_);
}

std::size_t Pieces::kept() {
  const std::lock_guard lock(mutex_);
  return free_.size();
}

void Pieces::give_back(void* block) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (free_.size() < keep_) {
      free_.reserve(keep_);
      free_.push_back(block);
      return;
    }
  }
  std::free(block);
}

at::Tensor alone(const at::Tensor& data, std::int64_t at, std::int64_t length) {
  if (!data.is_cpu() || data.scalar_type() != at::kByte || data.dim() != 1 || !data.is_contiguous()) {
    throw std::invalid_argument("bytes on the host are wanted, one after the other");
  }
  if (at < 0 || length < 0 || at > data.numel() || length > data.numel() - at) {
    throw std::out_of_range("the part is not in the tensor");
  }
  return at::from_blob(data.mutable_data_ptr<std::uint8_t>() + at, {length}, [data](void*) {}, at::kByte);
}

}  // namespace rpc_ext
