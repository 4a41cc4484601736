// A continuation made from a function, which the completing thread calls with the future.
#pragma once

#include <exception>
#include <utility>

#include "core/future.h"

namespace cudafuture::store {

template <class Function>
class FunctionContinuation final : public Continuation {
 public:
  explicit FunctionContinuation(Function function) : function_(std::move(function)) {}
  void run(Future& parent) noexcept override {
    function_(parent);
    delete this;
  }
  void abandon() noexcept override { delete this; }

 private:
  Function function_;
};

// Returns the error of a done future; null: none.
inline std::exception_ptr error_of(Future& done) noexcept {
  done.mark_seen();
  return done.state() == State::failed ? done.value().error : nullptr;
}

template <class Function>
void then(const FuturePtr& future, Function function) {
  future->attach(new FunctionContinuation<Function>(std::move(function)));
}

}  // namespace cudafuture::store
