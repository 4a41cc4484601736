// What an engine of torch owns of a future that follows it.
#pragma once

#include <limits>
#include <vector>

#include "bind/python.h"

namespace cudafuture::bind {

inline constexpr double kNoTimeout = std::numeric_limits<double>::infinity();

class Promise {
 public:
  // `value`: what the future completes with; none: what the engine has. `timeout`: seconds within which the engine says
  // that it will be done.
  // `devices`: those of `value`.
  explicit Promise(FuturePtr future, Foreign value = {}, double timeout = kNoTimeout,
                   std::vector<c10::Device> devices = {});
  // An engine that drops it says nothing any more: whoever waits is told.
  ~Promise();
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

  const std::vector<c10::Device>& devices() const noexcept { return devices_; }
  FuturePtr take() noexcept;
  void complete(c10::IValue value, EventSet events);
  void fail(std::exception_ptr error, EventSet events);

  // Every future whose engine is overdue by `grace` seconds.
  static std::vector<FuturePtr> overdue(double grace);

 private:
  FuturePtr future_;  // of one with a timeout: guarded by the lock of the list
  Foreign value_;
  const std::vector<c10::Device> devices_;
  const Future::Clock::time_point due_;
  Promise* next_ = nullptr;  // in the list of those with a timeout
  Promise* before_ = nullptr;
};

}  // namespace cudafuture::bind
