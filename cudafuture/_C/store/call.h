// One call by a user of a store, for one key or many. It is done when all its parts are done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>

#include "core/future.h"
#include "io/device.h"

namespace cudafuture::store {

class AtomicWrite;
struct FlushEpoch;

class Call {
 public:
  enum class Kind : std::uint8_t { write, read, link, deletion };

  Kind kind = Kind::write;
  Foreign keep;  // owns the memory and the tensors; dropped last
  FuturePtr future;
  std::shared_ptr<io::DeviceSide> device;  // null: all tensors are on the host
  std::uint64_t bytes = 0;                 // of all parts
  Foreign result;                          // of a read
  std::shared_ptr<AtomicWrite> atomic;     // null: each key of a write changes separately
  std::shared_ptr<FlushEpoch> epoch;       // of the store, which counts it

  void expect(std::size_t parts) noexcept { left_ = using_memory_ = parts; }

  void note_failure(std::exception_ptr error) noexcept;             // the first failure counts
  std::exception_ptr failure() const noexcept { return failure_; }  // after the last part has ended
  bool part_ended() noexcept { return left_.fetch_sub(1, std::memory_order_acq_rel) == 1; }  // true: the last one
  void part_released() noexcept;
  void finish() noexcept;  // completes the future

 private:
  Value value();

  std::atomic<std::size_t> left_{0};
  std::atomic<std::size_t> using_memory_{0};
  std::atomic<bool> has_failed_{false};
  std::exception_ptr failure_;
};
using CallPtr = std::shared_ptr<Call>;

}  // namespace cudafuture::store
