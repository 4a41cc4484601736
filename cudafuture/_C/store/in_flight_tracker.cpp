#include "store/in_flight_tracker.h"

#include <utility>

#include "core/error.h"

namespace cudafuture::store {

void InFlightTracker::begin(Call& call) {
  std::lock_guard lock(mutex_);
  if (is_closed_) throw Error(ErrorKind::invalid_state, "the store is closed");
  ++calls_;
  if (call.kind == Call::Kind::read) return;
  if (epochs_.empty()) epochs_.push_back(std::make_shared<FlushEpoch>());
  call.epoch = epochs_.back();
  ++call.epoch->left;
}

void InFlightTracker::end(Call& call) noexcept {
  std::vector<std::pair<FuturePtr, std::exception_ptr>> flushed;
  std::vector<FuturePtr> closed;
  {
    std::lock_guard lock(mutex_);
    if (--calls_ == 0) closed.swap(closings_);
    if (const std::shared_ptr<FlushEpoch> epoch = std::move(call.epoch)) {
      --epoch->left;
      if (const std::exception_ptr failure = call.failure()) note_failure(*epoch, failure);
      // Only the last epoch takes calls: it stays if no flush waits for it.
      while (!epochs_.empty() && epochs_.front()->left == 0) {
        const std::shared_ptr<FlushEpoch> done = std::move(epochs_.front());
        epochs_.pop_front();
        if (done->flush != nullptr) flushed.emplace_back(std::move(done->flush), done->failure);
      }
    }
  }
  for (auto& [flush, failure] : flushed) {
    if (failure != nullptr) {
      flush->fail(Value::of_error(failure));
    } else {
      flush->complete(Value());
    }
  }
  for (const FuturePtr& closing : closed) closing->complete(Value());
}

// Records a failure of a call of that epoch for each flush since then.
void InFlightTracker::note_failure(const FlushEpoch& epoch, const std::exception_ptr& failure) noexcept {
  bool is_since = false;
  for (const std::shared_ptr<FlushEpoch>& each : epochs_) {
    is_since = is_since || each.get() == &epoch;
    if (is_since && each->flush != nullptr && each->failure == nullptr) each->failure = failure;
  }
}

FuturePtr InFlightTracker::flush() {
  auto flush = c10::make_intrusive<Future>();
  flush->set_name("flush");
  {
    std::lock_guard lock(mutex_);
    if (is_closed_) throw Error(ErrorKind::invalid_state, "the store is closed");
    flush->start();
    if (!epochs_.empty()) {
      epochs_.back()->flush = flush;
      epochs_.push_back(std::make_shared<FlushEpoch>());
      return flush;
    }
  }
  flush->complete(Value());
  return flush;
}

bool InFlightTracker::is_closed() const {
  std::lock_guard lock(mutex_);
  return is_closed_;
}

FuturePtr InFlightTracker::close() {
  auto closing = c10::make_intrusive<Future>();
  closing->set_name("close");
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    closing->start();
    if (calls_ != 0) {
      closings_.push_back(closing);
      return closing;
    }
  }
  closing->complete(Value());
  return closing;
}

}  // namespace cudafuture::store
