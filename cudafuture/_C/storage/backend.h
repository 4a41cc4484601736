// What asks the kernel. Used by one thread, its engine's, but for wake().
#pragma once

#include <cstddef>
#include <vector>

#include "storage/block.h"

namespace cudafuture::storage {

class Backend {
 public:
  virtual ~Backend() = default;

  // Takes a block; it is begun by the next wait() at the latest. At most as many are inside as the queue is deep.
  virtual void put(Block& block) noexcept = 0;

  // Begins what was put, so that the disk is busy while the calling thread does something else.
  virtual void begin() noexcept = 0;

  // Begins what was put. Appends to `ended` what has ended since; when that is nothing and `may_block`, waits until
  // something has, or for wake().
  virtual void wait(bool may_block, std::vector<Block*>& ended) noexcept = 0;

  // Lets a wait(), or else the next one, come back. By any thread.
  virtual void wake() noexcept = 0;

  // Says where the buffers of all blocks are, while no block is inside.
  virtual void use_buffers(std::byte* buffers, std::size_t bytes) noexcept = 0;

  virtual const char* name() const noexcept = 0;
};

}  // namespace cudafuture::storage
