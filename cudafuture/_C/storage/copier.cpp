#include "storage/copier.h"

#include <pthread.h>

#include <system_error>

#include "storage/operation.h"

namespace cudafuture::storage {

Copier::~Copier() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

bool Copier::take(Block& block) noexcept {
  if (block.wanted < kWorthIt || has_failed_) return false;
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { loop(); });
    } catch (const std::system_error&) {
      has_failed_ = true;
      return false;
    }
  }
  {
    std::lock_guard lock(mutex_);
    if (queue_.size() >= kEnough) return false;
    queue_.push_back(&block);
  }
  wake_.notify_one();
  return true;
}

void Copier::loop() noexcept {
  pthread_setname_np(pthread_self(), "cudafuture-copy");
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return is_stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Block& block = *queue_.front();
    queue_.pop_front();
    lock.unlock();
    block.operation->stage(block);
    engine_.arrived(block);
    lock.lock();
  }
}

}  // namespace cudafuture::storage
