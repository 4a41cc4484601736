// In what order a callback runs, for those who issue collectives in it.
#pragma once

#include "bind/python.h"
#include "core/ordered_executor.h"

namespace cudafuture::bind {

// Stands around the call of a callback, and says of the calling thread:
//   program         it is no callback, or runs where its author put it: whoever wrote it answers for the order
//   in_lane         the callback of a lane: the same order on every rank
//   by_completion   whenever its future was completed: another order on every rank; or attached in one of these
//   beside          so too, of a future whose callbacks have an order, which this one was taken out of
class CallbackOrder {
 public:
  struct Kind {
    enum { is_program, is_in_lane, is_by_completion, is_beside } kind = is_program;
    const OrderedExecutor* order = nullptr;
    bool is_unordered() const noexcept { return kind == is_by_completion || kind == is_beside; }
  };
  static Kind program() noexcept { return {}; }
  static Kind in_lane() noexcept { return {Kind::is_in_lane, nullptr}; }
  static Kind by_completion() noexcept { return {Kind::is_by_completion, nullptr}; }
  static Kind beside(const OrderedExecutor& order) noexcept { return {Kind::is_beside, &order}; }

  explicit CallbackOrder(Kind kind) noexcept : outer_(current_) { current_ = kind; }
  ~CallbackOrder() { current_ = outer_; }
  CallbackOrder(const CallbackOrder&) = delete;
  CallbackOrder& operator=(const CallbackOrder&) = delete;

  static Kind current() noexcept { return current_; }

 private:
  static thread_local constinit Kind current_;
  const Kind outer_;
};

}  // namespace cudafuture::bind
