#include "io/buffers.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <sys/mman.h>

#include <cstdint>
#include <new>

#include "core/pinned_memory.h"
#include "io/page.h"

namespace cudafuture::io {
namespace {

std::byte* map_memory(std::size_t bytes) {
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

}  // namespace

Buffers::Buffers(std::size_t bytes) : data_(map_memory(bytes)), size_(bytes) {}

Buffers::~Buffers() { release(); }

void Buffers::release() noexcept {
  if (!pinned_.defined()) ::munmap(data_, size_);
}

void Buffers::pin() {
  const at::AutoDispatchBelowADInplaceOrView plain;
  at::Tensor memory = empty_pinned(size_);
  const auto before_page = [&memory] { return -reinterpret_cast<std::uintptr_t>(memory.mutable_data_ptr()) % kPage; };
  if (before_page() != 0) memory = empty_pinned(size_ + kPage);
  const std::size_t before = before_page();
  at::Tensor pinned = memory.narrow(0, static_cast<std::int64_t>(before), static_cast<std::int64_t>(size_));
  release();
  pinned_ = std::move(pinned);
  data_ = static_cast<std::byte*>(pinned_.mutable_data_ptr());
}

}  // namespace cudafuture::io
