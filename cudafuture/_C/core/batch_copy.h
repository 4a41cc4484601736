// The copy of a batch of tensors from the host to one device.
//
//     tensors on the host ──► staging buffer (pinned) ──► one slab on the device ──► views, one for each tensor
//
// The slab belongs to the stream that was current when it was allocated: the consumer's. The copy runs on another
// stream. That stream first waits for the work that the consumer had enqueued by then, because that work may still use
// the memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/event_pool.h"

namespace cudafuture {

// Device memory that a batch is copied into, and the event after which the memory may be written. It is allocated on
// the calling thread's current stream of the device.
class DeviceSlab {
 public:
  DeviceSlab(std::size_t nbytes, c10::Device device);
  explicit DeviceSlab(at::Tensor memory);  // memory of the caller, whose current stream has used it so far

  const at::Tensor& memory() const noexcept { return memory_; }  // uint8, contiguous
  std::size_t nbytes() const noexcept { return memory_.nbytes(); }
  void block(const c10::Stream& stream) const;  // makes the stream wait until the memory may be written

 private:
  at::Tensor memory_;
  DeviceEventPtr allocated_;
};

// The place of each tensor of a batch in a slab. Large tensors in pinned memory are not staged: each is copied by
// itself, and lies behind the staged tensors.
struct BatchLayout {
  BatchLayout(c10::ArrayRef<at::Tensor> tensors, bool pack);

  static constexpr std::size_t kAlignment = 512;  // bytes; the same as torch's CUDA allocator
  static constexpr std::size_t kAlone = 1 << 16;  // bytes from which a pinned tensor is copied by itself

  std::vector<std::size_t> offsets;
  std::vector<bool> is_staged;
  std::size_t staged = 0;  // bytes of the slab that are staged
  std::size_t nbytes = 0;  // of the slab
};

struct BatchCopyOptions {
  bool pack = true;                // one staging buffer and one copy; false: one of each for every tensor
  bool pin = true;                 // staging buffers are of pinned memory
  bool may_drop_unordered = true;  // the copies' owner may drop them without waiting: see record_stream
};

// Copies host tensors to the device of `stream`, on that stream. `slab` (null: none) is used if it is large enough;
// otherwise memory is allocated on the calling thread's current stream. Returns one tensor per source, with the same
// shape, dtype and dimension order, without gaps and without a gradient. Blocks while it copies to staging buffers.
std::vector<at::Tensor> copy_batch(c10::ArrayRef<at::Tensor> sources, const c10::Stream& stream, const DeviceSlab* slab,
                                   const BatchCopyOptions& options);

}  // namespace cudafuture
