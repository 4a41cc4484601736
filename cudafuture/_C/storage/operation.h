// One read or write of the user's: cut into blocks, and ended when all of them have.
//
//     next() ──► block ──► kernel ──► take() ──► again, for the rest
//        ▲          │        ▲           │
//        │          ▼        │           └──► ended; after the last one finish() completes the future
//        │        device ──► copied()
//        └─────── while there is more
//
// The checksum of a long block that is not staged is taken in the caller's memory while the kernel is busy: of a write
// after the kernel was asked, of a read when the block is free again.
//
// What is on a device goes by the block's buffer. Of a write the device fills it first. Of a read the device empties
// it last, when the block has ended for the operation: its future is complete when the last such copy is enqueued.
//
// Of a file that goes past the page cache whole units do, and the kernel takes them from the user's memory if that is
// aligned; else they are staged in the block's buffer. A part of a unit is written through the cache; it is read past
// it, with all of its unit, into the buffer. After a failure nothing more is cut.
//
// Used by one thread at a time, but for stage() and check(): each block, and each part of the checksum, has one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>

#include "core/future.h"
#include "storage/block.h"
#include "storage/checksum.h"
#include "storage/device.h"
#include "storage/file.h"
#include "storage/memory.h"

namespace cudafuture::storage {

struct Request {
  Direction direction = Direction::read;
  std::shared_ptr<File> file;
  std::uint64_t offset = 0;  // in the file, bytes
  Foreign keep;              // whatever owns the memory
  Memory memory;
  std::shared_ptr<DeviceSide> device;  // null: all of it is on the host
  bool is_part = false;                // of a call that orders its devices itself, when all parts are there
  std::shared_ptr<Checksum> checksum;  // null, or to be taken on the way; blocks have to be whole leaves
  FuturePtr future;  // completes with the bytes that went over; is released when a write does not need the memory
};

class Operation {
 public:
  // Where a block goes next: to the kernel; to stage(), on any thread, and then to staged(); to wait for the copies of
  // devices, and after those of a write to copied(); nowhere.
  enum class Outcome : std::uint8_t { kernel, host, device, ended };

  explicit Operation(Request&& request) noexcept
      : request_(std::move(request)), is_urgent_(request_.future->priority() < 0) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  // False when it was cancelled, or its file was closed: then it is over. Does nothing the second time.
  bool begin() noexcept;
  bool has_next() const noexcept { return failure_ == nullptr && cut_ < request_.memory.size(); }
  Outcome next(Block& block) noexcept;
  Outcome take(Block& block) noexcept;
  void stage(Block& block) noexcept;
  void check(std::size_t at, std::size_t size) noexcept;  // takes the checksum of bytes of the memory; on any thread
  void checked() noexcept;                                // after it
  Outcome staged(Block& block) noexcept;
  Outcome copied(Block& block) noexcept;
  bool is_over() const noexcept { return !is_in_line && !has_next() && under_way_ == 0; }
  void finish() noexcept;
  void give_up(std::exception_ptr error) noexcept;  // before it has begun
  bool has_succeeded() const noexcept { return failure_ == nullptr && cut_ == size(); }

  std::size_t size() const noexcept { return request_.memory.size(); }
  Direction direction() const noexcept { return request_.direction; }
  const DeviceSide* device() const noexcept { return request_.device.get(); }
  bool is_urgent() const noexcept { return is_urgent_; }
  bool waits_for_source() const noexcept;

  Operation* next_in_line = nullptr;  // of its engine
  bool is_in_line = false;

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
  Outcome give_back(Block& block, Outcome outcome) noexcept;
  bool is_on_device(const Block& block) const noexcept;
  void release_memory() noexcept;
  std::exception_ptr error(int code, std::uint64_t got) const;

  Request request_;
  const bool is_urgent_;  // of a negative priority
  File::Use use_;         // from the beginning to the end
  bool has_begun_ = false;
  std::size_t cut_ = 0;           // bytes of the memory
  std::size_t under_way_ = 0;     // blocks, and checks of blocks
  std::size_t using_memory_ = 0;  // of them those that are not staged, or not yet
  std::exception_ptr failure_;    // at the first byte that has failed
  std::size_t failed_after_ = 0;  // bytes before that one
};

}  // namespace cudafuture::storage
