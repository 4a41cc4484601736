// The in-flight tracker of a store: it counts calls, and completes the futures of flush() and close().
//
// Lock: mutex_ guards all fields; no future is completed under it.
#pragma once

#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "store/call.h"

namespace cudafuture::store {

// The calls between two flushes. It is done when all of them and all earlier ones are done.
struct FlushEpoch {
  std::size_t left = 0;
  FuturePtr flush;             // at its end; null: it is the current epoch, which takes calls
  std::exception_ptr failure;  // the first one since that flush was requested
};

class InFlightTracker {
 public:
  void begin(Call& call);  // throws Error if closed
  void end(Call& call) noexcept;

  // Returns a future that completes when all writes and deletions that have begun are done. It fails with the first
  // failure from now on.
  FuturePtr flush();
  bool is_closed() const;
  FuturePtr close();  // refuses new calls; completes when all calls have ended

 private:
  void note_failure(const FlushEpoch& epoch, const std::exception_ptr& failure) noexcept;

  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<FlushEpoch>> epochs_;
  std::size_t calls_ = 0;
  bool is_closed_ = false;
  std::vector<FuturePtr> closings_;
};

}  // namespace cudafuture::store
