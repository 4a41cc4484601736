// The pool of submit() as waits see it: its threads must not all wait for functions that only they could run.
#pragma once

#include <string>

#include "bind/future.h"

namespace cudafuture::bind {

bool is_submit_pool(nb::handle executor) noexcept;

// Returns true if a pending future, or a part of it, waits for a function of the pool to begin or to end.
bool waits_for_pool(const Future& future);

// Returns the reason why `future` does not complete if every thread of the pool waits for functions of the pool;
// otherwise an empty string.
std::string exhausted_pool(const Future& future);

// A scope in which a thread blocks until `future` is done. On a thread of the pool, and without a timeout, it raises
// InvalidStateError if every thread would now wait for functions of the pool, because none could ever run one.
class PoolWait {
 public:
  PoolWait(const Future& future, bool has_timeout);
  ~PoolWait();
  PoolWait(const PoolWait&) = delete;
  PoolWait& operator=(const PoolWait&) = delete;

  bool is_for_pool() const { return waits_for_pool(future_); }
  bool has_timeout() const noexcept { return has_timeout_; }

 private:
  const Future& future_;
  const bool has_timeout_;
};

void bind_submit_pool(nb::module_& m);

}  // namespace cudafuture::bind
