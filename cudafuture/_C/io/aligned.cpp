#include "io/aligned.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "io/page.h"

namespace cudafuture::io {
namespace {

constexpr std::size_t kSmallestAligned = 4 << 20;  // bytes
constexpr std::size_t kHugePage = 2 << 20;

class Aligned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* memory = nullptr;
    if (::posix_memalign(&memory, bytes < kHugePage ? kPage : kHugePage, bytes) != 0) throw std::bad_alloc();
    ::madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
    return {memory, memory, &std::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

at::Tensor make_aligned(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  return at::detail::empty_generic(sizes, &aligned_allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

}  // namespace

std::optional<std::uint64_t> bytes_of(const Shape& shape) {
  auto bytes = static_cast<std::int64_t>(c10::elementSize(shape.dtype));
  bool is_empty = false;
  bool is_too_large = false;
  for (const std::int64_t size : shape.sizes) {
    if (size < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    is_too_large = __builtin_mul_overflow(bytes, size, &bytes) || is_too_large;
  }
  if (is_empty) return 0;
  return is_too_large ? std::nullopt : std::optional(static_cast<std::uint64_t>(bytes));
}

c10::Allocator& aligned_allocator() {
  static Aligned allocator;
  return allocator;
}

at::Tensor make_aligned_bytes(std::size_t size) {
  return make_aligned({static_cast<std::int64_t>(size)}, c10::ScalarType::Byte);
}

at::Tensor make_tensor_on_host(const Shape& shape) {
  at::TensorOptions options = at::TensorOptions().dtype(shape.dtype).device(c10::kCPU);
  std::size_t bytes = c10::elementSize(shape.dtype);
  for (const std::int64_t size : shape.sizes) bytes *= static_cast<std::size_t>(size);
  if (bytes < kSmallestAligned) return at::empty(shape.sizes, options);
  return make_aligned(shape.sizes, shape.dtype);
}

}  // namespace cudafuture::io
