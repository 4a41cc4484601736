// The checksums that an engine takes while the kernel works.
#pragma once

#include <cstddef>
#include <deque>
#include <new>

#include "io/operation.h"

namespace cudafuture::io {

// Bytes of an operation's memory whose checksum is due.
struct Check {
  Operation* operation;
  std::size_t at;
  std::size_t size;
};

// A queue in the order of the blocks, with urgent operations first.
class Checks {
 public:
  // False: out of memory.
  bool push(const Check& check) noexcept {
    try {
      if (check.operation->is_urgent()) {
        checks_.push_front(check);
      } else {
        checks_.push_back(check);
      }
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  std::size_t size() const noexcept { return checks_.size(); }
  const Check& last() const noexcept { return checks_.back(); }
  void drop_last() noexcept { checks_.pop_back(); }

  Check pop_first() noexcept {
    const Check check = checks_.front();
    checks_.pop_front();
    return check;
  }

 private:
  std::deque<Check> checks_;
};

}  // namespace cudafuture::io
