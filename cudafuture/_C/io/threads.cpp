#include "io/threads.h"

#include <sys/uio.h>

#include <cerrno>
#include <system_error>

namespace cudafuture::io {

std::int64_t transfer(const Block& block) noexcept {
  const iovec* const pieces = block.pieces.data() + block.first;
  const auto count = static_cast<int>(block.count);
  const auto offset = static_cast<off_t>(block.offset);
  const ssize_t result = block.direction == Direction::read ? ::preadv(block.descriptor, pieces, count, offset)
                                                            : ::pwritev(block.descriptor, pieces, count, offset);
  return result < 0 ? -errno : result;
}

Threads::Threads(std::size_t count) {
  threads_.reserve(count);
  try {
    for (std::size_t i = 0; i < count; ++i) threads_.emplace_back([this] { loop(); });
  } catch (const std::system_error&) {  // the system refuses more: use those that were started
    if (threads_.empty()) throw;
  }
}

Threads::~Threads() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Threads::put(Block& block) noexcept { new_.push_back(&block); }

void Threads::begin() noexcept {
  std::lock_guard lock(mutex_);
  hand_over();
}

// Gives the new blocks to the threads. Called under the lock.
void Threads::hand_over() noexcept {
  for (Block* const block : new_) handed_over_.push(block);
  if (new_.size() == 1) {
    work_.notify_one();
  } else if (!new_.empty()) {
    work_.notify_all();
  }
  new_.clear();
}

void Threads::wait(bool may_block, std::vector<Block*>& ended) noexcept {
  std::unique_lock lock(mutex_);
  hand_over();
  if (may_block) end_.wait(lock, [this] { return woken_ || !ended_.empty(); });
  woken_ = false;
  ended.insert(ended.end(), ended_.begin(), ended_.end());
  ended_.clear();
}

void Threads::wake() noexcept {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
  }
  end_.notify_one();
}

void Threads::loop() noexcept {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || !handed_over_.empty(); });
    Block* const block = handed_over_.pop();
    if (block == nullptr) return;
    lock.unlock();
    block->result = transfer(*block);
    lock.lock();
    ended_.push_back(block);
    end_.notify_one();
  }
}

}  // namespace cudafuture::io
