#include "io/copier.h"

#include <pthread.h>

#include <system_error>

#include "io/operation.h"

namespace cudafuture::io {

Copier::~Copier() {
  {
    std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

bool Copier::take(Block& block) noexcept { return block.wanted >= Block::kLong && take(Work{&block, {}}); }

bool Copier::take(const Check& check) noexcept { return take(Work{nullptr, check}); }

bool Copier::take(const Work& work) noexcept {
  if (has_failed_) return false;
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
    queue_.push_back(work);
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
    const Work work = queue_.front();
    queue_.pop_front();
    lock.unlock();
    if (work.block != nullptr) {
      work.block->operation->stage(*work.block);
      engine_.arrived(*work.block);
    } else {
      work.check.operation->check(work.check.at, work.check.size);
      engine_.checked(work.check.operation);
    }
    lock.lock();
  }
}

}  // namespace cudafuture::io
