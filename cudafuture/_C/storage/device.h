// The part of a read or write that is on devices: streams to copy on, and what orders them.
//
//     write    caller's streams ──► [finished] ──► copies on pool streams ──► [finished] ──► kernel
//     read     kernel ──► copies on pool streams, after the caller's streams ──► events of the future
//
// A write begins when what its caller had enqueued has finished: until then it would hold buffers that others could
// use. A read does not wait: the disk is at work while the device still uses the target.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include "core/event_set.h"
#include "core/future.h"
#include "storage/block.h"
#include "storage/memory.h"

namespace cudafuture::storage {

class DeviceSide {
 public:
  // In the thread of whoever submits: takes streams of the pool, and notes what is enqueued on the current ones.
  DeviceSide(c10::ArrayRef<c10::Device> devices, Direction direction, int priority);

  // The bytes of a tensor as they are stored, one after the other: its own memory, or that of a dense tensor which is
  // filled from it, or from which it is filled. `changes` says that the tensor was given for that.
  at::Tensor bytes_of(const at::Tensor& tensor);

  // What has to have finished before a write begins: done, with events.
  const FuturePtr& earlier() const noexcept { return earlier_; }

  // Enqueue copies between a block's buffer, which is pinned, and memory; the host's part is copied at once. The future
  // is done, and its events are those of the copies.
  FuturePtr gather(const Memory& memory, const Block& block) const;
  FuturePtr scatter(const Memory& memory, const Block& block) const;

  // Ends a read after its last copy: fills the targets that are not dense unless the read has failed, and records the
  // events of all that was enqueued, also after a failure. `failure` becomes what fails here, if nothing has before.
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
  std::vector<std::pair<at::Tensor, at::Tensor>> scattered_;  // those that are not dense, and what they are filled from
};

}  // namespace cudafuture::storage
