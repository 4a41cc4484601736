#include "storage/ledger.h"

#include <utility>

#include "core/error.h"

namespace cudafuture::storage {

void Ledger::begin(Call& call) {
  std::lock_guard lock(mutex_);
  if (is_closed_) throw Error(ErrorKind::invalid_state, "the store is closed");
  ++calls_;
  if (call.kind == Call::Kind::read) return;
  if (epochs_.empty()) epochs_.push_back(std::make_shared<Epoch>());
  call.epoch = epochs_.back();
  ++call.epoch->left;
}

void Ledger::end(Call& call) noexcept {
  std::vector<std::pair<FuturePtr, std::exception_ptr>> flushed;
  {
    std::lock_guard lock(mutex_);
    if (--calls_ == 0) idle_.notify_all();
    if (call.epoch == nullptr) return;
    --call.epoch->left;
    if (call.epoch->failure == nullptr && !call.epoch->flushes.empty()) call.epoch->failure = call.failure();
    // Only the last epoch still takes calls: it goes on when nobody waits for it.
    std::exception_ptr failure;
    while (!epochs_.empty() && epochs_.front()->left == 0) {
      const std::shared_ptr<Epoch> done = std::move(epochs_.front());
      epochs_.pop_front();
      if (failure == nullptr) failure = done->failure;
      for (FuturePtr& flush : done->flushes) flushed.emplace_back(std::move(flush), failure);
    }
    call.epoch = nullptr;
  }
  for (auto& [flush, failure] : flushed) {
    if (failure != nullptr) {
      flush->fail(Value::of_error(failure));
    } else {
      flush->complete(Value());
    }
  }
}

FuturePtr Ledger::flush() {
  auto flush = c10::make_intrusive<Future>();
  flush->set_name("flush");
  {
    std::lock_guard lock(mutex_);
    if (is_closed_) throw Error(ErrorKind::invalid_state, "the store is closed");
    flush->start();
    if (!epochs_.empty()) {
      epochs_.back()->flushes.push_back(flush);
      epochs_.push_back(std::make_shared<Epoch>());
      return flush;
    }
  }
  flush->complete(Value());
  return flush;
}

void Ledger::close() noexcept {
  std::unique_lock lock(mutex_);
  is_closed_ = true;
  idle_.wait(lock, [this] { return calls_ == 0; });
}

}  // namespace cudafuture::storage
