#include "io/operation.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>

#include "core/error.h"
#include "core/sync_edge.h"
#include "io/failure.h"
#include "io/page.h"

namespace cudafuture::io {
namespace {

constexpr unsigned kMostInVain = 1000;  // more results without progress mean a faulty kernel

}  // namespace

bool Operation::begin() noexcept {
  if (std::exchange(has_begun_, true)) return true;
  if (!request_.future->start()) return false;
  use_ = File::Use(*request_.file);
  if (use_) return true;
  failure_ = std::make_exception_ptr(
      Error(ErrorKind::invalid_state, "the file was closed before this could begin: " + request_.file->path()));
  return false;
}

bool Operation::waits_for_source() const noexcept {
  if (request_.device == nullptr || request_.direction == Direction::read || !stands(SyncEdge::io_source_wait)) {
    return false;
  }
  return !request_.device->earlier()->device_work_finished();
}

Operation::Outcome Operation::next(Block& block) noexcept {
  const File& file = *request_.file;
  block.operation = this;
  block.direction = request_.direction;
  block.offset = request_.offset + cut_;
  block.at = cut_;
  block.ahead = block.done = block.first = 0;
  block.in_vain = 0;
  block.is_staged = block.was_refused = block.is_unchecked = false;
  if (!file.is_direct() || file.unit() > block.buffer_size) {
    cut_through_cache(block, block.buffer_size - block.offset % std::min<std::uint64_t>(kPage, block.buffer_size));
  } else if (request_.direction == Direction::write) {
    cut_write(block);
  } else {
    cut_read(block);
  }
  cut_ += block.wanted;
  ++in_flight_;
  if (!block.is_staged) ++using_memory_;
  if (request_.direction == Direction::read) return Outcome::kernel;
  return fill_buffer(block);
}

// For a write.
Operation::Outcome Operation::fill_buffer(Block& block) noexcept {
  if (block.is_staged && is_on_device(block)) {
    try {
      block.copied = request_.device->gather(request_.memory, block.at, block.wanted, block.pinned);
    } catch (...) {
      return failed_at(block, block.at, std::current_exception());
    }
    ++using_memory_;
    return stands(SyncEdge::io_source_copied) ? Outcome::device : copied(block);
  }
  if (!block.is_staged && (request_.checksum == nullptr || check_later(block))) return Outcome::kernel;
  if (block.is_staged) ++using_memory_;
  return Outcome::host;
}

bool Operation::is_on_device(const Block& block) const noexcept {
  return request_.device != nullptr && request_.memory.is_on_device(block.at, block.wanted);
}

void Operation::stage(Block& block) noexcept {
  if (request_.direction == Direction::write) {
    if (block.is_staged) request_.memory.gather(block.at, block.wanted, block.buffer);
    check(block);
  } else {
    check(block);
    if (block.is_staged) request_.memory.scatter(block.at, block.wanted, block.buffer + block.ahead);
  }
}

Operation::Outcome Operation::staged(Block& block) noexcept {
  if (request_.direction == Direction::read) return release(block, Outcome::ended);
  if (block.is_staged) --using_memory_;
  if (using_memory_ == 0 && !has_next()) release_memory();
  return Outcome::kernel;
}

Operation::Outcome Operation::copied(Block& block) noexcept {
  if (const std::exception_ptr error = block.copied->late_error()) return failed_at(block, block.at, error);
  block.copied = nullptr;
  --using_memory_;
  check(block);
  if (using_memory_ == 0 && !has_next()) release_memory();
  return Outcome::kernel;
}

// Takes the checksum of a block's bytes, in its buffer or in memory.
void Operation::check(const Block& block) noexcept {
  if (request_.checksum == nullptr) return;
  if (!block.is_staged) return check(block.at, block.wanted);
  const iovec staged = {block.buffer + block.ahead, block.wanted};
  request_.checksum->take(block.at, &staged, 1);
}

// Returns true if check(), and then checked(), will be called for the block's bytes. False: there are too few bytes.
bool Operation::check_later(Block& block) noexcept {
  if (block.wanted < Block::kLong) return false;
  block.is_unchecked = true;
  ++in_flight_;
  ++using_memory_;
  return true;
}

void Operation::check(std::size_t at, std::size_t size) noexcept {
  std::array<iovec, Block::kMostPieces> pieces;
  const std::size_t count = request_.memory.pieces(at, size, pieces.data(), pieces.size());
  request_.checksum->take(at, pieces.data(), count);
}

void Operation::checked() noexcept {
  --in_flight_;
  --using_memory_;
  if (using_memory_ == 0 && !has_next()) release_memory();
}

void Operation::cut_through_cache(Block& block, std::size_t most) const noexcept {
  block.descriptor = request_.file->through_cache();
  block.size = block.wanted = std::min(most, size() - cut_);
  if (!aim_at_memory(block)) aim_at_buffer(block);
}

void Operation::cut_write(Block& block) const noexcept {
  const std::size_t unit = request_.file->unit();
  const std::size_t left = size() - cut_;
  const std::size_t into_unit = block.offset % unit;
  if (into_unit != 0 || left < unit) return cut_through_cache(block, unit - into_unit);
  block.descriptor = request_.file->past_cache();
  block.size = block.wanted = floor_to(std::min(left, block.buffer_size), unit);
  if (!aim_at_memory(block) || !suits_device(block)) aim_at_buffer(block);
}

void Operation::cut_read(Block& block) const noexcept {
  const std::size_t unit = request_.file->unit();
  const std::size_t left = size() - cut_;
  block.descriptor = request_.file->past_cache();
  block.ahead = block.offset % unit;
  // Bytes that fit into one block use one block, with all their units; otherwise the whole units come first.
  if (block.ahead == 0 && (left % unit == 0 || left > block.buffer_size)) {
    block.size = block.wanted = floor_to(std::min(left, block.buffer_size), unit);
    if (aim_at_memory(block) && suits_device(block)) return;
  }
  block.offset -= block.ahead;
  block.size = std::min<std::size_t>(ceil_to(block.ahead + left, unit), floor_to(block.buffer_size, unit));
  block.wanted = std::min(left, block.size - block.ahead);
  aim_at_buffer(block);
}

bool Operation::aim_at_memory(Block& block) const noexcept {
  block.count = request_.memory.pieces(block.at, block.wanted, block.pieces.data(), Block::kMostPieces);
  return block.count > 0;
}

bool Operation::suits_device(const Block& block) const noexcept {
  const Alignment& alignment = request_.file->alignment();
  return std::all_of(block.pieces.begin(), block.pieces.begin() + block.count, [&alignment](const iovec& piece) {
    return reinterpret_cast<std::uintptr_t>(piece.iov_base) % alignment.memory == 0 &&
           piece.iov_len % alignment.offset == 0;
  });
}

void Operation::aim_at_buffer(Block& block) const noexcept {
  block.is_staged = true;
  block.pieces[0] = {block.buffer, block.size};
  block.count = 1;
}

Operation::Outcome Operation::take(Block& block) noexcept {
  File& file = *request_.file;
  const std::int64_t result = block.result;
  if (result == -EINVAL && block.descriptor == file.past_cache() && !file.must_be_direct()) {
    block.was_refused = true;
    block.descriptor = file.through_cache();
    return Outcome::kernel;
  }
  const bool is_in_vain = result == -EAGAIN || result == -EINTR || (result == 0 && block.direction == Direction::write);
  if (is_in_vain && ++block.in_vain < kMostInVain) return Outcome::kernel;
  if (result <= 0) return failed(block, static_cast<int>(-result));
  block.in_vain = 0;
  if (block.was_refused) file.fall_back();  // the request was not at fault
  block.advance(static_cast<std::size_t>(result));
  if (block.done >= block.ahead + block.wanted) return ended(block);
  // At the end of the file or of the space, the rest is not a whole unit.
  if (block.descriptor == file.past_cache() && block.offset % file.unit() != 0) block.descriptor = file.through_cache();
  return Outcome::kernel;
}

Operation::Outcome Operation::failed(Block& block, int code) noexcept {
  const std::size_t at = block.at + (block.done > block.ahead ? block.done - block.ahead : 0);
  return failed_at(block, at, error(code, at));
}

Operation::Outcome Operation::failed_at(Block& block, std::size_t at, std::exception_ptr error) noexcept {
  note_failure(at, std::move(error));
  if (block.copied != nullptr) --using_memory_;
  block.copied = nullptr;
  block.wanted = 0;
  return ended(block);
}

Operation::Outcome Operation::ended(Block& block) noexcept {
  if (request_.direction == Direction::write || block.wanted == 0) return release(block, Outcome::ended);
  if (is_on_device(block)) {
    check(block);
    return release(block, empty_buffer(block));
  }
  if (block.is_staged) return Outcome::host;
  if (request_.checksum != nullptr && !check_later(block)) return Outcome::host;
  return release(block, Outcome::ended);
}

// Ends the operation's use of a block. A device may still use the block.
Operation::Outcome Operation::release(Block& block, Outcome outcome) noexcept {
  if (!block.is_staged) --using_memory_;
  --in_flight_;
  block.operation = nullptr;
  if (using_memory_ == 0 && !has_next()) release_memory();
  return outcome;
}

// For a read.
Operation::Outcome Operation::empty_buffer(Block& block) noexcept {
  try {
    const auto begin = static_cast<std::int64_t>(block.ahead);
    const at::Tensor bytes = block.pinned.narrow(0, begin, static_cast<std::int64_t>(block.wanted));
    block.copied = request_.device->scatter(request_.memory, block.at, bytes);
    return stands(SyncEdge::io_target_copied) ? Outcome::device : Outcome::ended;
  } catch (...) {
    note_failure(block.at, std::current_exception());
    return Outcome::ended;
  }
}

void Operation::note_failure(std::size_t at, std::exception_ptr error) noexcept {
  if (failure_ != nullptr && at >= failed_after_) return;
  failed_after_ = at;
  failure_ = std::move(error);
}

void Operation::release_memory() noexcept { request_.future->release(); }

void Operation::abandon(std::exception_ptr error) noexcept {
  if (request_.future->start()) failure_ = std::move(error);
  cut_ = size();
}

void Operation::finish() noexcept {
  const auto bytes = static_cast<std::int64_t>(size());
  release_memory();
  EventSet events;
  std::vector<at::Tensor> targets;
  if (request_.device != nullptr && request_.direction == Direction::read && !request_.is_part) {
    events = request_.device->end_read(failure_);
    targets = request_.device->targets();
  }
  // Release the file and the memory first: a callback of the future may need the file's space, and the tensors' owner
  // must drop them last.
  use_ = File::Use();
  request_.file = nullptr;
  request_.memory = Memory();
  request_.device = nullptr;
  if (failure_ != nullptr) {
    request_.future->fail(Value::of_error(failure_), std::move(events));
  } else {
    request_.future->complete(Value::of_native(bytes), std::move(events), std::move(targets));
  }
}

std::exception_ptr Operation::error(int code, std::uint64_t got) const {
  const bool is_read = request_.direction == Direction::read;
  std::string message = (is_read ? "reading " : "writing ") + std::to_string(size()) + " bytes at offset " +
                        std::to_string(request_.offset) + " of " + request_.file->path() + " ended after " +
                        std::to_string(got) + ": ";
  if (code != 0) {
    message += std::generic_category().message(code);
  } else {
    message += is_read ? "there the file ends" : "the kernel takes no more";
  }
  return std::make_exception_ptr(
      Failure(std::move(message), code, request_.file->path(), request_.offset, size(), got));
}

}  // namespace cudafuture::io
