// A key that was written, or deleted; and the changes of a write that takes effect as a whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "storage/call.h"
#include "storage/entry.h"

namespace cudafuture::storage {

struct Change {
  CallPtr call;
  std::string key;
  std::uint64_t turn = 0;
  EntryPtr entry;           // null: a deletion
  bool* written = nullptr;  // see Write
};

// The changes of an atomic write, which wait for each other.
//
// Lock: mutex_ guards everything; nothing is taken under it.
class AtomicWrite {
 public:
  explicit AtomicWrite(std::size_t writes) : left_(writes) {}

  struct Outcome {
    std::vector<Change> changes;
    bool has_failed = false;
  };
  // One write has ended; without a change it has failed. Returns the outcome with the last one.
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

}  // namespace cudafuture::storage
