// A pointer that keeps a future's memory, but not the future: its members stay readable, and it may be over.
//
// The walk over pending futures holds these. The cyclic collector takes a future that an engine also owns for
// reachable. If a thread outside the interpreter became such an owner in the middle of a collection, the collector
// would take the future's children for garbage.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <utility>

namespace cudafuture {

class Future;

class WeakFuture {
 public:
  WeakFuture() = default;
  // Some other reference, strong or weak, keeps the future meanwhile.
  explicit WeakFuture(Future& future) noexcept;
  WeakFuture(WeakFuture&& other) noexcept : future_(std::exchange(other.future_, nullptr)) {}
  WeakFuture& operator=(WeakFuture&& other) noexcept {
    std::swap(future_, other.future_);
    return *this;
  }
  ~WeakFuture();

  Future* get() const noexcept { return future_; }
  Future& operator*() const noexcept { return *future_; }
  Future* operator->() const noexcept { return future_; }
  std::size_t owners() const noexcept;  // strong references

 private:
  Future* future_ = nullptr;
};

}  // namespace cudafuture
