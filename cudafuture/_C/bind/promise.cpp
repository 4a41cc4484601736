#include "bind/promise.h"

#include <mutex>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/process.h"

namespace cudafuture::bind {
namespace {

std::mutex& list_mutex() {
  static auto* mutex = new std::mutex;  // leaked: engines run until the end of the process
  return *mutex;
}
Promise* first = nullptr;

Clock::duration as_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

Clock::time_point due_after(double timeout) {
  return timeout < 1e9 ? Clock::now() + as_duration(timeout) : Clock::time_point::max();
}

}  // namespace

Promise::Promise(FuturePtr future, Foreign value, double timeout, std::vector<c10::Device> devices)
    : future_(std::move(future)), value_(std::move(value)), devices_(std::move(devices)), due_(due_after(timeout)) {
  if (due_ == Clock::time_point::max()) return;
  std::lock_guard lock(list_mutex());
  next_ = first;
  if (first != nullptr) first->before_ = this;
  first = this;
}

Promise::~Promise() {
  const FuturePtr future = take();
  if (future == nullptr || future.use_count() == 1 || is_shut_down() || is_forked_child()) return;
  future->mark_seen();  // no caller got this error: do not report it as unseen
  future->fail(Value::of_error(std::make_exception_ptr(Error(
      ErrorKind::invalid_state,
      "the torch future that this one follows was dropped before it completed; keep it alive until it is done"))));
}

FuturePtr Promise::take() noexcept {
  if (due_ == Clock::time_point::max() || is_forked_child()) return std::move(future_);
  std::lock_guard lock(list_mutex());
  if (future_ != nullptr) {
    (before_ == nullptr ? first : before_->next_) = next_;
    if (next_ != nullptr) next_->before_ = before_;
  }
  return std::move(future_);
}

void Promise::complete(c10::IValue value, EventSet events) {
  Value result = value_ ? Value::of_object(std::move(value_)) : Value::of_native(std::move(value));
  take()->complete(std::move(result), std::move(events));
}

void Promise::fail(std::exception_ptr error, EventSet events) {
  take()->fail(Value::of_error(std::move(error)), std::move(events));
}

std::vector<FuturePtr> Promise::overdue(double grace) {
  std::vector<FuturePtr> overdue;
  const Clock::time_point now = Clock::now() - as_duration(grace);
  std::lock_guard lock(list_mutex());
  for (const Promise* promise = first; promise != nullptr; promise = promise->next_) {
    if (promise->due_ < now && !promise->future_->done()) overdue.push_back(promise->future_);
  }
  return overdue;
}

}  // namespace cudafuture::bind
