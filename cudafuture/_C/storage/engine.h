// Reads and writes of files: one thread, one backend, one line of operations.
//
//     submit() ──► inbox ──► line ──► blocks ──► backend ──► kernel
//                                        ▲                     │
//                                        └──── free again ◄────┘
//
// Any thread submits. The engine's own takes operations in the order in which they came, cuts the first one into blocks
// while there are free ones, and the next one when that is cut. There are as many blocks as the queue is deep, each
// with a buffer of the block's size: that is all the memory that an engine takes.
//
// Without a user an engine ends when what was submitted has been done; so does the process.
//
// Lock: mutex_ guards the inbox, the flags, and the backend against being woken when it is gone: under it the backend's
// own is taken, and no other.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/thread_cache.h"
#include "storage/backend.h"
#include "storage/faults.h"
#include "storage/operation.h"

namespace cudafuture::storage {

enum class BackendKind : std::uint8_t { automatic, io_uring, threads };

class Engine final : private ThreadCache::Task {
 public:
  struct Options {
    BackendKind backend = BackendKind::automatic;
    std::size_t queue_depth = 32;         // blocks
    std::size_t block_size = 512 * 1024;  // bytes, a multiple of 4096
    std::size_t threads = 8;              // of the backend of that name
    std::size_t max_pending = 0;          // operations; 0: any number
    std::optional<FaultRates> faults;
  };

  struct Statistics {
    std::uint64_t reads = 0;  // operations that have ended
    std::uint64_t writes = 0;
    std::uint64_t bytes_read = 0;  // of those that have not failed
    std::uint64_t bytes_written = 0;
    std::uint64_t blocks = 0;   // asked of the kernel for the first time
    std::uint64_t again = 0;    // and once more
    std::uint64_t staged = 0;   // blocks that went by a buffer
    std::uint64_t pending = 0;  // operations now
  };

  // Throws Failure when there is no such backend.
  static std::shared_ptr<Engine> start(const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Blocks while as many operations are pending as there may be. Throws Error when the engine is closed.
  void submit(Request&& request);

  // Takes no more operations. Those that it has are still done.
  void close() noexcept;
  void join() noexcept;  // after close(): returns when they are

  void let_go() noexcept;  // of an engine whose faults hold all results

  const Options& options() const noexcept { return options_; }
  const char* backend_name() const noexcept { return backend_name_; }
  const std::string& why_not_io_uring() const noexcept { return why_not_; }
  Statistics statistics() const noexcept;

 private:
  class Line {
   public:
    bool empty() const noexcept { return first_ == nullptr; }
    Operation* first() const noexcept { return first_; }
    void push(Operation* operation) noexcept;
    Operation* pop() noexcept;
    void append(Line& other) noexcept;

   private:
    Operation* first_ = nullptr;
    Operation* last_ = nullptr;
  };

  explicit Engine(const Options& options);

  void perform() noexcept override;
  bool set_up() noexcept;
  void loop() noexcept;
  void cut_blocks() noexcept;
  void take(Block& block) noexcept;
  void end(Operation* operation) noexcept;
  bool has_work() const noexcept { return !line_.empty() || free_.size() < blocks_.size(); }
  static void close_all() noexcept;

  const Options options_;
  const char* backend_name_ = "";
  std::string why_not_;

  // ---- of the engine's thread
  std::byte* buffers_ = nullptr;
  std::vector<Block> blocks_;
  std::vector<Block*> free_;  // the last to be free is the first to be used: its buffer is in the cache
  std::unique_ptr<Backend> backend_;
  Faults* faults_ = nullptr;
  Line line_;
  std::shared_ptr<Engine> self_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Line inbox_;
  std::size_t pending_ = 0;
  bool wants_wake_ = false;
  bool is_closed_ = false;
  bool is_set_up_ = false;
  bool has_ended_ = false;

  struct Counters {
    std::atomic<std::uint64_t> reads{0}, writes{0}, bytes_read{0}, bytes_written{0}, blocks{0}, again{0}, staged{0};
  };
  Counters counters_;
};

}  // namespace cudafuture::storage
