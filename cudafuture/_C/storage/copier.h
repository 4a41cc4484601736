// A second thread of an engine, which stages blocks and takes checksums while the first one asks the kernel.
//
// It begins with the first block that is worth it. When it has enough to do already the engine does the work itself:
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
#include "storage/checks.h"
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

  // Takes a checksum, and tells the engine. False: the engine is to do it.
  bool take(const Check& check) noexcept;

  static constexpr std::size_t kEnough = 2;  // blocks and checks in the queue

 private:
  struct Work {
    Block* block;  // null: the check
    Check check;
  };

  bool take(const Work& work) noexcept;
  void loop() noexcept;

  Watching& engine_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work> queue_;
  bool is_stopping_ = false;
  bool has_failed_ = false;  // there is no thread to be had
  std::thread thread_;
};

}  // namespace cudafuture::storage
