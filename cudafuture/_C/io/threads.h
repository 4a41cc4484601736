// A backend of threads that block in the kernel, for systems where io_uring is missing or forbidden.
//
// Lock: mutex_ guards the two lists and the flags; no other lock is taken under it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "core/intrusive_list.h"
#include "io/backend.h"

namespace cudafuture::io {

class Threads final : public Backend {
 public:
  explicit Threads(std::size_t count);
  ~Threads() override;

  void put(Block& block) noexcept override;
  void begin() noexcept override;
  void wait(bool may_block, std::vector<Block*>& ended) noexcept override;
  void wake() noexcept override;
  void use_buffers(std::byte*, std::size_t) noexcept override {}
  const char* name() const noexcept override { return "threads"; }

 private:
  void loop() noexcept;
  void hand_over() noexcept;

  std::vector<Block*> new_;  // used by the engine's thread only
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable end_;
  IntrusiveList<Block> handed_over_;
  std::vector<Block*> ended_;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// Makes the request in the calling thread. Returns bytes, or a negative errno.
std::int64_t transfer(const Block& block) noexcept;

}  // namespace cudafuture::io
