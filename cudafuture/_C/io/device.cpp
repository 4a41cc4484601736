#include "io/device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "core/capture.h"
#include "core/error.h"
#include "core/stream_pool.h"
#include "core/sync_edge.h"

namespace cudafuture::io {
namespace {

// Returns the memory of a dense tensor as bytes.
at::Tensor as_bytes(const at::Tensor& tensor) {
  at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte).layout(at::kStrided).requires_grad(false));
  const auto begin = tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize());
  bytes.set_(tensor.storage(), begin, {static_cast<std::int64_t>(tensor.nbytes())}, {1});
  return bytes;
}

}  // namespace

DeviceSide::DeviceSide(c10::ArrayRef<c10::Device> devices, Direction direction, int priority)
    : direction_(direction),
      devices_(devices.vec()),
      streams_(pool_streams(devices, priority)),
      earlier_(c10::make_intrusive<Future>(priority)) {
  EventSet events = EventSet::record(devices_, current_streams(devices_));
  if (events.is_captured()) {
    throw Error(
        ErrorKind::invalid_state,
        "a file or a store cannot be read or written inside a stream capture: captured work runs when the graph "
        "is replayed, and the disk would not be ordered with it. Do it before or after the capture");
  }
  if (direction_ == Direction::read && stands(SyncEdge::io_target_wait)) {
    for (const c10::Stream& stream : streams_) events.block(stream);
  }
  earlier_->complete(Value(), std::move(events));
}

at::Tensor DeviceSide::bytes_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  if (direction_ == Direction::read) {
    targets_.push_back(tensor);
    if (stands(SyncEdge::io_target_record_stream)) {
      const c10::impl::VirtualGuardImpl guard(tensor.device().type());
      for (const c10::Stream& stream : streams_) {
        if (stream.device() == tensor.device()) guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
      }
    }
  }
  if (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) return as_bytes(tensor);
  const StreamScope scope(streams_);
  if (direction_ == Direction::write) {
    for (const c10::Stream& stream : streams_) earlier_->events().block(stream);
    return as_bytes(tensor.resolve_conj().resolve_neg().contiguous());
  }
  const at::Tensor dense = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  scattered_.emplace_back(tensor, dense);
  return as_bytes(dense);
}

template <class Enqueue>
FuturePtr DeviceSide::copy(Enqueue&& enqueue) const {
  const at::AutoDispatchBelowADInplaceOrView plain;
  const StreamScope scope(streams_);
  auto copied = c10::make_intrusive<Future>();
  try {
    enqueue();
    copied->complete(Value(), EventSet::record(devices_, streams_));
  } catch (...) {
    finish_what_was_enqueued();
    throw;
  }
  return copied;
}

// Waits until no device uses a buffer any more, so that the buffers can be reused.
void DeviceSide::finish_what_was_enqueued() const noexcept {
  for (const c10::Stream& stream : streams_) {
    try {
      const c10::DeviceGuard guard(stream.device());
      const BesideCaptures relaxed(stream.device_type());
      c10::impl::VirtualGuardImpl(stream.device_type()).synchronizeStream(stream);
    } catch (...) {  // a failed device has no more work
    }
  }
}

at::Tensor DeviceSide::new_target(const Shape& shape, c10::Device device, Memory& memory) const {
  const at::AutoDispatchBelowADInplaceOrView plain;
  const StreamScope scope(streams_);  // the allocator reuses the memory in the order of this stream
  at::Tensor tensor = at::empty(shape.sizes, at::TensorOptions().dtype(shape.dtype).device(device));
  memory.add_on_device(as_bytes(tensor));
  return tensor;
}

FuturePtr DeviceSide::gather(const Memory& memory, std::size_t at, std::size_t size, const at::Tensor& into) const {
  return copy([&] { memory.gather(at, size, into); });
}

FuturePtr DeviceSide::scatter(const Memory& memory, std::size_t at, const at::Tensor& from) const {
  return copy([&] { memory.scatter(at, from.nbytes(), from); });
}

void DeviceSide::fill_targets() const {
  if (scattered_.empty()) return;
  const at::AutoDispatchBelowADInplaceOrView plain;
  const StreamScope scope(streams_);
  for (const auto& [target, dense] : scattered_) target.copy_(dense, /*non_blocking=*/true);
}

EventSet DeviceSide::end_read(std::exception_ptr& failure) const noexcept {
  if (failure == nullptr) {
    try {
      fill_targets();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (!stands(failure == nullptr ? SyncEdge::io_read_record : SyncEdge::io_failure_record)) return {};
  return EventSet::record_possible(devices_, streams_, failure);
}

}  // namespace cudafuture::io
