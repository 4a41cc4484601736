// Memory of tensors that travel between workers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace rpc_ext {

// Blocks that are used again. The kernel clears new memory before anybody gets it, which takes as long as reading a
// disk into it. Blocks begin at a huge page, so disks fetch and fill them without a copy in between.
class Pieces : public std::enable_shared_from_this<Pieces> {
 public:
  // Blocks of `size` bytes, of which `keep` at most are kept while nobody uses them.
  Pieces(std::size_t size, std::size_t keep) : size_(size), keep_(keep) {}
  ~Pieces();
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  // A tensor of bytes, not initialized, whose storage has nothing else. When the last who uses it lets go of that, in
  // whatever thread, the block is free again. What is small, or too large for a block, is memory like any other.
  at::Tensor take(std::int64_t nbytes);

  // The same memory as torch's engine keeps it; null where `nbytes` does not fill most of a block, which whoever keeps
  // the memory for long would be wasting.
  c10::DataPtr receive(std::size_t nbytes);

  std::size_t kept();

 private:
  struct Lease;

  void* get();
  void give_back(void* block) noexcept;

  const std::size_t size_, keep_;
  std::mutex mutex_;  // guards what follows
  std::vector<void*> free_;
};

// A part of a tensor of bytes on the host, as a tensor whose storage has nothing else: torch's RPC copies what is a
// part of a storage. It keeps the whole.
at::Tensor alone(const at::Tensor& data, std::int64_t at, std::int64_t length);

}  // namespace rpc_ext
