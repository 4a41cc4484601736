// A second thread of an engine, which stages blocks and takes checksums while the first thread issues requests.
//
// It starts with the first block that is large enough. When its queue is full, the engine does the work itself, so both
// threads stay busy and neither waits for the other.
//
// Lock: mutex_ guards the queue and the flag; no other lock is taken under it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>

#include "io/block.h"
#include "io/checks.h"
#include "io/watch.h"

namespace cudafuture::io {

class Copier {
 public:
  explicit Copier(Watching& engine) noexcept : engine_(engine) {}
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Stages the block, which then arrives at the engine. False: the engine must stage it.
  bool take(Block& block) noexcept;

  // Takes a checksum, and notifies the engine. False: the engine must take it.
  bool take(const Check& check) noexcept;

  static constexpr std::size_t kEnough = 2;  // blocks and checks in the queue

 private:
  struct Work {
    Block* block;  // null: the work is the check
    Check check;
  };

  bool take(const Work& work) noexcept;
  void loop() noexcept;

  Watching& engine_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Work> queue_;
  bool is_stopping_ = false;
  bool has_failed_ = false;  // no thread could be started
  std::thread thread_;
};

}  // namespace cudafuture::io
