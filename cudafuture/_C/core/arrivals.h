// Waiting for the first of several futures.
//
// Each future has a waiter of the set, so an arrival follows completion directly: the completing thread releases
// waiters before it runs any callback, and takes neither a place in a serial queue nor the interpreter's lock for them.
//
// Lock: mutex_ guards the list of arrivals and the signal. The signal is completed outside of it.
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
  // Starts to wait for all of them. Those that are done already have arrived, in their order.
  // The caller keeps them alive: a reference here would make a future look as if an engine were to complete it.
  explicit Arrivals(std::vector<Future*> futures);
  // Stops waiting for those that have not arrived.
  ~Arrivals();
  Arrivals(const Arrivals&) = delete;
  Arrivals& operator=(const Arrivals&) = delete;

  // Takes the position of the next one that has arrived out of the list. False: none has.
  bool take(std::size_t& position);

  // A future that is done when one has arrived that was not taken yet.
  FuturePtr next();

 private:
  class One;

  void arrive(std::size_t position) noexcept;

  const std::vector<Future*> futures_;
  std::vector<std::unique_ptr<One>> waiters_;  // by position; null: it had arrived before
  std::mutex mutex_;
  std::deque<std::size_t> arrived_;
  FuturePtr signal_;  // null: nothing waits
};

}  // namespace cudafuture
