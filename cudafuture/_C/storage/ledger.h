// Which calls of a store are under way, for those who wait for all of them.
//
// Lock: mutex_ guards everything; no future is completed under it.
#pragma once

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
  FuturePtr flush;             // at its end; null: it is the last one, which takes calls
  std::exception_ptr failure;  // the first one since that flush was asked for
};

class Ledger {
 public:
  void begin(Call& call);  // throws Error when it is closed
  void end(Call& call) noexcept;

  // Completes when all writes and deletions that have begun are done; fails as the first of them that fails from now
  // on.
  FuturePtr flush();
  bool is_closed() const;
  FuturePtr close();  // begins no more calls; completes when all have ended

 private:
  void note_failure(const Epoch& epoch, const std::exception_ptr& failure) noexcept;

  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<Epoch>> epochs_;
  std::size_t calls_ = 0;
  bool is_closed_ = false;
  std::vector<FuturePtr> closings_;
};

}  // namespace cudafuture::storage
