// The order in which a callback runs, for operations that issue collectives in it.
#pragma once

#include "bind/python.h"
#include "core/ordered_executor.h"

namespace cudafuture::bind {

// A scope around the call of a callback, which describes the calling thread:
//   program          not in a callback, or in one whose executor its author chose: the author answers for the order
//   in_serial_queue  in a callback of a serial queue: the same order on every rank
//   by_completion    in a callback that runs when its future completes, or that was attached in one: the order differs
//                    between ranks
//   beside           like by_completion, for a future whose callbacks have an order, from which this one was removed
class CallbackOrder {
 public:
  struct Kind {
    enum { is_program, is_in_serial_queue, is_by_completion, is_beside } kind = is_program;
    const OrderedExecutor* order = nullptr;
    bool is_unordered() const noexcept { return kind == is_by_completion || kind == is_beside; }
  };
  static Kind program() noexcept { return {}; }
  static Kind in_serial_queue() noexcept { return {Kind::is_in_serial_queue, nullptr}; }
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
