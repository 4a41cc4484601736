#include "core/arrivals.h"

#include <utility>

namespace cudafuture {

class Arrivals::One final : public Waiter {
 public:
  One(Arrivals& set, std::size_t position) noexcept : set_(set), position_(position) {}
  void release() noexcept override {
    set_.arrive(position_);
    Waiter::release();  // the last access: the set's destructor waits for it
  }

 private:
  Arrivals& set_;
  const std::size_t position_;
};

Arrivals::Arrivals(std::vector<Future*> futures) : futures_(std::move(futures)) {
  waiters_.reserve(futures_.size());
  for (std::size_t i = 0; i < futures_.size(); ++i) {
    auto one = std::make_unique<One>(*this, i);
    if (futures_[i]->add(*one)) {
      waiters_.push_back(std::move(one));
    } else {
      waiters_.push_back(nullptr);
      arrive(i);
    }
  }
}

Arrivals::~Arrivals() {
  for (std::size_t i = 0; i < futures_.size(); ++i) {
    if (waiters_[i] != nullptr) futures_[i]->remove(*waiters_[i]);
  }
}

void Arrivals::arrive(std::size_t position) noexcept {
  FuturePtr signal;
  {
    std::lock_guard lock(mutex_);
    arrived_.push_back(position);
    signal = std::move(signal_);
  }
  if (signal != nullptr) signal->complete({});
}

bool Arrivals::take(std::size_t& position) {
  {
    std::lock_guard lock(mutex_);
    if (arrived_.empty()) return false;
    position = arrived_.front();
    arrived_.pop_front();
  }
  if (const std::unique_ptr<One> waiter = std::move(waiters_[position])) futures_[position]->remove(*waiter);
  return true;
}

FuturePtr Arrivals::next(std::shared_ptr<Producer> outstanding) {
  auto signal = c10::make_intrusive<Future>();
  signal->set_maker(Maker::collect_any);
  if (outstanding != nullptr) signal->set_producer(std::move(outstanding));
  {
    std::lock_guard lock(mutex_);
    if (arrived_.empty()) {
      signal_ = signal;
      return signal;
    }
  }
  signal->complete({});
  return signal;
}

}  // namespace cudafuture
