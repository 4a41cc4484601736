// The interface through which an engine issues requests to the kernel. Only the engine's thread uses it, except wake().
#pragma once

#include <cstddef>
#include <vector>

#include "io/block.h"

namespace cudafuture::io {

class Backend {
 public:
  virtual ~Backend() = default;

  // Takes a block; the next wait() begins it at the latest. The backend holds at most as many blocks as the queue
  // depth.
  virtual void put(Block& block) noexcept = 0;

  // Begins the blocks that were put, so that the disk is busy while the calling thread does other work.
  virtual void begin() noexcept = 0;

  // Begins the blocks that were put, and appends the blocks that ended since the last call to `ended`. If there are
  // none and `may_block`, it blocks until a block ends or wake() is called.
  virtual void wait(bool may_block, std::vector<Block*>& ended) noexcept = 0;

  // Makes the current wait(), or else the next one, return. Any thread may call it.
  virtual void wake() noexcept = 0;

  // Sets the memory of all blocks' buffers. Called while the backend holds no block.
  virtual void use_buffers(std::byte* buffers, std::size_t bytes) noexcept = 0;

  virtual const char* name() const noexcept = 0;
};

}  // namespace cudafuture::io
