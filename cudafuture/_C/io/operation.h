// One read or write by the user: it is cut into blocks, and ends when all of them have ended.
//
//     next() ──► block ──► kernel ──► take() ──► again, for the rest
//        ▲          │        ▲           │
//        │          ▼        │           └──► ended; after the last one finish() completes the future
//        │        device ──► copied()
//        └─────── while there is more
//
// The checksum of a long block that is not staged is taken from the caller's memory while the kernel is busy: for a
// write after the request was issued, for a read when the block is free again.
//
// Device memory goes through the block's buffer. In a write the device fills the buffer first. In a read the device
// empties it last, after the operation has ended its use of the block: the future completes when the last such copy is
// enqueued.
//
// In a file that is open for direct I/O, whole units are transferred directly. The kernel uses the user's memory if it
// is aligned; otherwise they are staged in the block's buffer. A part of a unit is written through the page cache. It
// is read directly, with its whole unit, into the buffer. After a failure no more blocks are cut.
//
// Used by one thread at a time, except stage() and check(): each block, and each part of the checksum, has one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "core/future.h"
#include "io/block.h"
#include "io/checksum.h"
#include "io/device.h"
#include "io/file.h"
#include "io/memory.h"

namespace cudafuture::io {

struct Request {
  Direction direction = Direction::read;
  std::shared_ptr<File> file;
  std::uint64_t offset = 0;  // in the file, bytes
  Foreign keep;              // owns the memory
  Memory memory;
  std::shared_ptr<DeviceSide> device;  // null: all of it is on the host
  bool is_part = false;                // part of a call that orders its devices itself, after all parts
  std::shared_ptr<Checksum> checksum;  // null, or computed during the transfer; blocks must then be whole leaves
  FuturePtr future;  // completes with the number of bytes; is released when a write does not need the memory any more
};

class Operation {
 public:
  // The next step of a block: the kernel; stage() on any thread, then staged(); the copies of devices, then copied() if
  // it is a write; or none.
  enum class Outcome : std::uint8_t { kernel, host, device, ended };

  explicit Operation(Request&& request) noexcept
      : request_(std::move(request)), is_urgent_(request_.future->priority() < 0) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // False: the operation was cancelled or its file was closed, and it has ended. A second call does nothing.
  bool begin() noexcept;
  bool has_next() const noexcept { return failure_ == nullptr && cut_ < request_.memory.size(); }
  Outcome next(Block& block) noexcept;
  Outcome take(Block& block) noexcept;
  void stage(Block& block) noexcept;
  void check(std::size_t at, std::size_t size) noexcept;  // takes the checksum of a range of the memory; any thread
  void checked() noexcept;                                // called after check()
  Outcome staged(Block& block) noexcept;
  Outcome copied(Block& block) noexcept;
  bool is_over() const noexcept { return !is_queued && !has_next() && in_flight_ == 0; }
  void finish() noexcept;
  void abandon(std::exception_ptr error) noexcept;  // before it has begun
  bool has_succeeded() const noexcept { return failure_ == nullptr && cut_ == size(); }

  std::size_t size() const noexcept { return request_.memory.size(); }
  Direction direction() const noexcept { return request_.direction; }
  const DeviceSide* device() const noexcept { return request_.device.get(); }
  bool is_urgent() const noexcept { return is_urgent_; }
  bool waits_for_source() const noexcept;

  Operation* next_in_queue = nullptr;  // in its engine's inbox, then in a queue
  bool is_queued = false;

 private:
  void cut_through_cache(Block& block, std::size_t most) const noexcept;
  void cut_write(Block& block) const noexcept;
  void cut_read(Block& block) const noexcept;
  bool aim_at_memory(Block& block) const noexcept;
  bool suits_device(const Block& block) const noexcept;
  void aim_at_buffer(Block& block) const noexcept;
  Outcome fill_buffer(Block& block) noexcept;
  Outcome empty_buffer(Block& block) noexcept;
  void check(const Block& block) noexcept;
  bool check_later(Block& block) noexcept;
  Outcome failed(Block& block, int code) noexcept;
  Outcome failed_at(Block& block, std::size_t at, std::exception_ptr error) noexcept;
  void note_failure(std::size_t at, std::exception_ptr error) noexcept;
  Outcome ended(Block& block) noexcept;
  Outcome release(Block& block, Outcome outcome) noexcept;
  bool is_on_device(const Block& block) const noexcept;
  void release_memory() noexcept;
  std::exception_ptr error(int code, std::uint64_t got) const;

  Request request_;
  const bool is_urgent_;  // of a negative priority
  File::Use use_;         // from begin to end
  bool has_begun_ = false;
  std::size_t cut_ = 0;           // bytes of the memory
  std::size_t in_flight_ = 0;     // blocks in flight, and checks of blocks
  std::size_t using_memory_ = 0;  // those that are not staged, or not yet
  std::exception_ptr failure_;    // of the first byte that failed
  std::size_t failed_after_ = 0;  // bytes before that byte
};

}  // namespace cudafuture::io
