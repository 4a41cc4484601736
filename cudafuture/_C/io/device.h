// The device side of a read or write: the streams that copy, and the events that order them.
//
//     write    caller's streams ──► [finished] ──► copies on pool streams ──► [finished] ──► kernel
//     read     kernel ──► copies on pool streams, after the caller's streams ──► events of the future
//
// A write begins when the device work that its caller had enqueued has finished: earlier, it would hold buffers that
// other operations could use. A read does not wait: the disk works while the device still uses the target.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include "core/event_set.h"
#include "core/future.h"
#include "io/aligned.h"
#include "io/block.h"
#include "io/memory.h"

namespace cudafuture::io {

class DeviceSide {
 public:
  // Called in the submitting thread: takes pool streams, and notes the work enqueued on the current streams.
  DeviceSide(c10::ArrayRef<c10::Device> devices, Direction direction, int priority);

  // Returns the bytes of a tensor as they are stored, contiguous: its own memory, or that of a dense tensor that is
  // copied from it or to it. `changes`: the tensor is a read's target.
  at::Tensor bytes_of(const at::Tensor& tensor);

  // The work that must finish before a write begins: done, with events.
  const FuturePtr& earlier() const noexcept { return earlier_; }

  // Returns a new tensor on a device as a read's target, and adds it to memory. Later copies fill it.
  at::Tensor new_target(const Shape& shape, c10::Device device, Memory& memory) const;

  // Enqueue copies between memory, from `at` on, and a pinned tensor of bytes; host memory is copied immediately. The
  // returned future is done, and its events are those of the copies.
  FuturePtr gather(const Memory& memory, std::size_t at, std::size_t size, const at::Tensor& into) const;
  FuturePtr scatter(const Memory& memory, std::size_t at, const at::Tensor& from) const;

  // Ends a read after its last copy. It fills the targets that are not dense, unless the read has failed, and records
  // events after all enqueued work, even after a failure. `failure` becomes the first failure here, if it was null.
  EventSet end_read(std::exception_ptr& failure) const noexcept;
  std::vector<at::Tensor> targets() const { return targets_; }

 private:
  template <class Enqueue>
  FuturePtr copy(Enqueue&& enqueue) const;
  void finish_what_was_enqueued() const noexcept;
  void fill_targets() const;

  Direction direction_;
  std::vector<c10::Device> devices_;
  std::vector<c10::Stream> streams_;  // one of each device
  FuturePtr earlier_;
  std::vector<at::Tensor> targets_;                           // of a read
  std::vector<std::pair<at::Tensor, at::Tensor>> scattered_;  // targets that are not dense, with their sources
};

}  // namespace cudafuture::io
