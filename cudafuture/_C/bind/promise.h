// The part of a future that one of torch's engines owns when the future follows it.
#pragma once

#include <limits>
#include <vector>

#include "bind/python.h"

namespace cudafuture::bind {

inline constexpr double kNoTimeout = std::numeric_limits<double>::infinity();

class Promise {
 public:
  // `value`: the value to complete the future with; none: the engine's value. `timeout`: seconds within which the
  // engine should be done. `devices`: the devices of `value`.
  explicit Promise(FuturePtr future, Foreign value = {}, double timeout = kNoTimeout,
                   std::vector<c10::Device> devices = {});
  // Fails the future if the engine drops its promise without completing it.
  ~Promise();
  Promise(const Promise&) = delete;
  Promise& operator=(const Promise&) = delete;

  const std::vector<c10::Device>& devices() const noexcept { return devices_; }
  FuturePtr take() noexcept;
  void complete(c10::IValue value, EventSet events);
  void fail(std::exception_ptr error, EventSet events);

  // Returns every future whose engine is overdue by `grace` seconds.
  static std::vector<FuturePtr> overdue(double grace);

 private:
  FuturePtr future_;  // with a timeout: guarded by the lock of the list
  Foreign value_;
  const std::vector<c10::Device> devices_;
  const Future::Clock::time_point due_;
  Promise* next_ = nullptr;  // in the list of promises with a timeout
  Promise* before_ = nullptr;
};

}  // namespace cudafuture::bind
