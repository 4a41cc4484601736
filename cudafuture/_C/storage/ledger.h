// Which calls of a store are under way, for those who wait for all of them.
//
// Lock: mutex_ guards everything; no future is completed under it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "storage/call.h"

namespace cudafuture::storage {

// The calls between two flushes. Done when all of them and all earlier ones are.
struct Epoch {
  std::size_t left = 0;
  std::vector<FuturePtr> flushes;
  std::exception_ptr failure;  // the first one
};

class Ledger {
 public:
  void begin(Call& call);  // throws Error when it is closed
  void end(Call& call) noexcept;

  // Completes when all writes and deletions that have begun are done; fails as the first of them that fails.
  FuturePtr flush();
  void close() noexcept;  // begins no more calls, and returns when all have ended

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<std::shared_ptr<Epoch>> epochs_;
  std::size_t calls_ = 0;
  bool is_closed_ = false;
};

}  // namespace cudafuture::storage
