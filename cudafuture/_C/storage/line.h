// A first-in-first-out queue of operations. It owns nothing.
#pragma once

#include "storage/operation.h"

namespace cudafuture::storage {

class Line {
 public:
  bool empty() const noexcept { return first_ == nullptr; }
  Operation* first() const noexcept { return first_; }

  void push(Operation* operation) noexcept {
    operation->next_in_line = nullptr;
    operation->is_in_line = true;
    (last_ == nullptr ? first_ : last_->next_in_line) = operation;
    last_ = operation;
  }

  Operation* pop() noexcept {
    Operation* const operation = first_;
    first_ = operation->next_in_line;
    if (first_ == nullptr) last_ = nullptr;
    operation->is_in_line = false;
    return operation;
  }

 private:
  Operation* first_ = nullptr;
  Operation* last_ = nullptr;
};

}  // namespace cudafuture::storage
