// A written or deleted key, and the changes of an atomic write.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "store/call.h"
#include "store/entry.h"

namespace cudafuture::store {

struct Change {
  CallPtr call;
  std::string key;
  std::uint64_t sequence = 0;
  EntryPtr entry;           // null: a deletion
  bool* written = nullptr;  // see Write
};

// The changes of an atomic write, collected until all its writes have ended.
//
// Lock: mutex_ guards all fields; no other lock is taken under it.
class AtomicWrite {
 public:
  explicit AtomicWrite(std::size_t writes) : left_(writes) {}

  struct Outcome {
    std::vector<Change> changes;
    bool has_failed = false;
  };
  // Ends one write; a write without a change has failed. The last call returns the outcome.
  std::optional<Outcome> end(std::optional<Change>&& change) {
    std::lock_guard lock(mutex_);
    if (change) {
      outcome_.changes.push_back(std::move(*change));
    } else {
      outcome_.has_failed = true;
    }
    return --left_ == 0 ? std::optional(std::move(outcome_)) : std::nullopt;
  }

 private:
  std::mutex mutex_;
  std::size_t left_;
  Outcome outcome_;
};

}  // namespace cudafuture::store
