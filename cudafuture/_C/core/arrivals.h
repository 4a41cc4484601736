// Waiting for the first of several futures.
//
// Each future has a waiter of the set. The completing thread releases waiters before it runs any callback, so an
// arrival follows completion directly. It takes neither a place in a serial queue nor the interpreter's lock.
//
// Lock: mutex_ guards the list of arrivals and the signal. The signal is completed outside the lock.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "core/future.h"

namespace cudafuture {

class Arrivals {
 public:
  // Starts to wait for all `futures`. Futures that are already done have arrived, in their order. The caller keeps the
  // futures alive: a reference held here would look like an engine that is going to complete the future.
  explicit Arrivals(std::vector<Future*> futures);
  // Stops waiting for the futures that have not arrived.
  ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  // Takes the position of the next arrival out of the list. False: the list is empty. The future at that position is
  // not used any more.
  bool take(std::size_t& position);

  // Returns a future that is done once an arrival has not been taken yet. `outstanding` visits the other futures.
  FuturePtr next(std::shared_ptr<Producer> outstanding = {});

 private:
  class One;

  void arrive(std::size_t position) noexcept;

  const std::vector<Future*> futures_;
  std::vector<std::unique_ptr<One>> waiters_;  // by position; null: it was already done, or has been taken
  std::mutex mutex_;
  std::deque<std::size_t> arrived_;
  FuturePtr signal_;  // null: no caller waits
};

}  // namespace cudafuture
