// The I/O engine: a thread that issues requests to the kernel, a thread that copies, a backend, and queues of
// operations.
//
//     submit() ──► inbox ──► queues ──► blocks ◄──► backend ◄──► kernel
//                                         ▲ ▲
//                         free again ─────┘ └──► copies of devices
//
// Any thread submits. The engine's thread cuts blocks from the waiting operations, in the order of their queues.
// Operations with devices get at most three quarters of the blocks, so a busy device does not delay the other
// operations.
//
// The number of blocks is the queue depth, and each has a buffer of the block size: an engine uses no other memory. The
// second thread copies staged blocks whenever there is other work for the first one. Long checksums wait until the
// kernel has as many requests as it may have: the disk comes first. The second thread shares them.
//
// An engine that is not referenced any more ends when all submitted operations are done; so does the process.
//
// Lock: mutex_ guards the inbox, the flags, and the backend against a wake() after its destruction. Only the backend's
// own lock is taken under it.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/thread_cache.h"
#include "io/backend.h"
#include "io/buffers.h"
#include "io/checks.h"
#include "io/copier.h"
#include "io/counter.h"
#include "io/faults.h"
#include "io/operation.h"
#include "io/queues.h"
#include "io/watch.h"

namespace cudafuture::io {

enum class BackendKind : std::uint8_t { automatic, io_uring, threads };

class Engine final : private ThreadCache::Task, private Watching {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    BackendKind backend = BackendKind::automatic;
    std::size_t queue_depth = 32;         // blocks
    std::size_t block_size = 512 * 1024;  // bytes, a multiple of 4096
    std::size_t threads = 8;              // of the threads backend
    std::size_t max_pending = 0;          // operations; 0: any number
    std::optional<FaultRates> faults;
  };

  struct Statistics {
    std::uint64_t reads = 0;  // operations that have ended
    std::uint64_t writes = 0;
    std::uint64_t bytes_read = 0;  // of those that have not failed
    std::uint64_t bytes_written = 0;
    std::uint64_t blocks = 0;   // blocks issued to the kernel for the first time
    std::uint64_t again = 0;    // blocks issued again
    std::uint64_t staged = 0;   // blocks that went through a buffer
    std::uint64_t copied = 0;   // staged blocks that a device filled or emptied
    std::uint64_t pending = 0;  // operations in flight or queued
  };

  // Throws Failure if that backend is not available.
  static std::shared_ptr<Engine> start(const Options& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Full::wait: submit() blocks while the maximum number of operations is pending; Full::exceed: it does not. Throws
  // Error if the engine is closed.
  enum class Full : std::uint8_t { wait, exceed };
  bool wait_for_room(Clock::time_point deadline);  // false: no room before the deadline
  void submit(Request&& request, Full when_full = Full::wait);

  // Takes no more operations. Those already submitted are completed.
  void close() noexcept;
  void join() noexcept;  // after close(): returns when they are complete
  bool join_until(Clock::time_point deadline) noexcept;

  void release_held() noexcept;  // releases the results that injected faults hold

  const Options& options() const noexcept { return options_; }
  const char* backend_name() const noexcept { return backend_name_; }
  const std::string& why_not_io_uring() const noexcept { return why_not_; }
  Statistics statistics() const noexcept;

 private:
  explicit Engine(const Options& options);

  void perform() noexcept override;
  const char* thread_name() const noexcept override { return "cudafuture-io"; }
  bool set_up() noexcept;
  void aim_blocks_at_buffers() noexcept;
  void loop() noexcept;
  bool collect() noexcept;
  void cut_blocks() noexcept;
  Queues::ForDevices blocks_for_devices() const noexcept;
  void pin_buffers_for(Operation& operation) noexcept;
  void cut_block(Operation& operation) noexcept;
  void pass_on(Block& block, Operation::Outcome outcome) noexcept;
  void free_block(Block& block) noexcept;
  void note_check(Operation& operation, Block& block) noexcept;
  void check_some() noexcept;
  void end_check(Operation* operation) noexcept;
  bool is_busy() const noexcept { return blocks_.size() - free_.size() > 2; }  // with more than this block
  void take(Block& block) noexcept;
  void land(Block& block) noexcept;
  void arrived(Block& block) noexcept override;
  void checked(Operation* operation) noexcept override;
  void wake() noexcept;
  void put_in(Operation* operation) noexcept override;
  void end(Operation* operation) noexcept;
  bool is_over() const noexcept {
    return is_closed_ && pending_ == 0 && arrived_.empty() && free_.size() == blocks_.size();
  }
  bool has_room() const noexcept { return is_closed_ || options_.max_pending == 0 || pending_ < options_.max_pending; }
  static void close_all() noexcept;

  const Options options_;
  const char* backend_name_ = "";
  std::string why_not_;

  // ---- used by the engine's thread only
  Buffers buffers_;
  std::vector<Block> blocks_;
  std::deque<Arrival> arrivals_;  // one for each block
  std::vector<Block*> free_;      // last in, first out: the most recent buffer is in the processor's cache
  std::unique_ptr<Backend> backend_;
  Faults* faults_ = nullptr;
  std::optional<Copier> copier_;
  Queues queues_;
  std::size_t most_for_devices_;  // blocks
  std::size_t of_devices_ = 0;    // blocks in use by them
  Checks checks_;
  std::vector<Block*> landed_;
  std::vector<Operation*> landed_checks_;
  std::shared_ptr<Engine> self_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  OperationList inbox_;
  std::vector<Block*> arrived_;
  std::vector<Operation*> checked_;
  std::size_t pending_ = 0;
  bool is_waiting_ = false;  // the thread must be woken for an arrival
  bool wants_work_ = false;  // the thread must be woken for a submission, too
  bool is_closed_ = false;
  bool is_set_up_ = false;
  bool has_ended_ = false;

  struct Counters {
    Counter reads{0}, writes{0}, bytes_read{0}, bytes_written{0}, blocks{0}, again{0}, staged{0}, copied{0};
  };
  Counters counters_;
};

}  // namespace cudafuture::io
