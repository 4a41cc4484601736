// A second thread of an engine, which copies and sums what is staged while the first one asks the kernel.
//
// It begins with the first block that is worth it. When it has enough to do already the engine stages a block itself:
// so both are busy, and neither waits for the other.
//
// Lock: mutex_ guards the queue and the flag; nothing is taken under it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>

#include "storage/block.h"
#include "storage/watch.h"

namespace cudafuture::storage {

class Copier {
 public:
  explicit Copier(Watching& engine) noexcept : engine_(engine) {}
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Stages the block, which then arrives at the engine. False: the engine is to do it.
  bool take(Block& block) noexcept;

 private:
  static constexpr std::size_t kWorthIt = 64 * 1024;  // bytes of a block
  static constexpr std::size_t kEnough = 2;           // blocks in the queue

  void loop() noexcept;

  Watching& engine_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Block*> queue_;
  bool is_stopping_ = false;
  bool has_failed_ = false;  // there is no thread to be had
  std::thread thread_;
};

}  // namespace cudafuture::storage
