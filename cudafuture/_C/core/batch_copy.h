// The tensors of a batch on their way from the host to one device.
//
//     tensors on the host ──► staging buffer (pinned) ──► one slab on the device ──► views, one for each tensor
//
// The slab belongs to the stream that was current when it was allocated: the consumer's. The copy runs on another
// stream, which waits for what the consumer had enqueued by then, since that may still use the memory.
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

// Device memory that a batch is copied into, and the event after which it may be written. Allocated on the calling
// thread's current stream of the device.
class DeviceSlab {
 public:
  DeviceSlab(std::size_t nbytes, c10::Device device);
  explicit DeviceSlab(at::Tensor memory);  // of a caller, whose current stream has used it until now

  const at::Tensor& memory() const noexcept { return memory_; }  // uint8, contiguous
  std::size_t nbytes() const noexcept { return memory_.nbytes(); }
  void block(const c10::Stream& stream) const;  // the stream waits until the memory may be written

 private:
  at::Tensor memory_;
  DeviceEventPtr allocated_;
};

// Where each tensor of a batch lies in a slab. Tensors of pinned memory that are large go to the device by themselves,
// and lie behind those that are staged.
struct BatchLayout {
  BatchLayout(c10::ArrayRef<at::Tensor> tensors, bool pack);

  static constexpr std::size_t kAlignment = 512;  // bytes; as torch's allocator for CUDA has it
  static constexpr std::size_t kAlone = 1 << 16;  // bytes from which a pinned tensor is not staged

  std::vector<std::size_t> offsets;
  std::vector<bool> is_staged;
  std::size_t staged = 0;  // bytes of the slab that are staged
  std::size_t nbytes = 0;  // of the slab
};

struct BatchCopyOptions {
  bool pack = true;                // one staging buffer and one copy; false: one of each for every tensor
  bool pin = true;                 // staging buffers are of pinned memory
  bool may_drop_unordered = true;  // the owner of the copies may drop them without waiting: see record_stream
};

// Copies tensors of the host to the device of `stream`, on it. `slab` (null: none) is used where it is large enough;
// else memory is allocated on the calling thread's current stream. Returns a tensor for each source, of the same shape,
// dtype and order of dimensions, without gaps and without a gradient. Blocks for the time of copying to staging
// buffers.
std::vector<at::Tensor> copy_batch(c10::ArrayRef<at::Tensor> sources, const c10::Stream& stream, const DeviceSlab* slab,
                                   const BatchCopyOptions& options);

}  // namespace cudafuture
