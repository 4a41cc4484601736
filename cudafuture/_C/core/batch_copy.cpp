#include "core/batch_copy.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "core/pinned_memory.h"
#include "core/stream_pool.h"
#include "core/sync_edge.h"

namespace cudafuture {
namespace {

std::size_t aligned(std::size_t bytes) {
  return (bytes + BatchLayout::kAlignment - 1) / BatchLayout::kAlignment * BatchLayout::kAlignment;
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg();
}

// Returns the strides of a copy: the source's, without gaps.
std::vector<std::int64_t> dense_strides(const at::Tensor& source) {
  if (source.is_non_overlapping_and_dense()) return source.strides().vec();
  return at::infer_dense_strides(source.sizes(), source.strides());
}

// Returns a tensor like `source` whose memory is a part of `slab`.
at::Tensor view_like(const at::Tensor& source, const at::Tensor& slab, std::size_t offset) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(slab.storage()),
                                                             slab.key_set(), source.dtype());
  c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
  const std::size_t begin = static_cast<std::size_t>(slab.storage_offset()) + offset;  // bytes: a slab is of uint8
  impl->set_storage_offset(static_cast<std::int64_t>(begin / source.itemsize()));
  impl->set_sizes_and_strides(source.sizes(), dense_strides(source));
  return view;
}

at::Tensor allocate(std::size_t nbytes, c10::Device device) {
  return at::empty({static_cast<std::int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte).device(device));
}

at::Tensor allocate_staging(std::size_t nbytes, const BatchCopyOptions& options) {
  return options.pin ? empty_pinned(nbytes) : allocate(nbytes, at::kCPU);
}

void write_staging(const at::Tensor& source, const at::Tensor& staging, std::size_t offset) {
  if (source.numel() == 0) return;
  if (is_plain_memory(source)) {
    std::memcpy(static_cast<char*>(staging.mutable_data_ptr()) + offset, source.const_data_ptr(), source.nbytes());
  } else {
    view_like(source, staging, offset).copy_(source);
  }
}

// Tells the allocator that the stream uses the memory: its owner may free it before the owner's stream waits.
void record_use(const at::Tensor& memory, const c10::Stream& stream) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  guard.recordDataPtrOnStream(memory.storage().data_ptr(), stream);
}

// Enqueues copies into `memory` on the stream.
template <class Enqueue>
void enqueue_on(const c10::Stream& stream, c10::ArrayRef<at::Tensor> memory, const BatchCopyOptions& options,
                Enqueue&& enqueue) {
  const auto record = [&] {
    if (!stands(SyncEdge::batch_record_stream)) return;
    for (const at::Tensor& each : memory) record_use(each, stream);
  };
  if (options.may_drop_unordered) record();
  const StreamScope scope(stream);
  try {
    enqueue();
  } catch (...) {  // some copies may be enqueued, and the caller frees the memory
    if (!options.may_drop_unordered) record();
    throw;
  }
}

std::vector<at::Tensor> copy_packed(c10::ArrayRef<at::Tensor> sources, const c10::Stream& stream,
                                    const DeviceSlab* given, const BatchCopyOptions& options) {
  const BatchLayout layout(sources, true);
  std::optional<DeviceSlab> allocated;
  if (given == nullptr || given->nbytes() < layout.nbytes) {
    given = &allocated.emplace(layout.nbytes, stream.device());
  }
  const at::Tensor& slab = given->memory();
  const at::Tensor staging = allocate_staging(layout.staged, options);
  std::vector<at::Tensor> copies;
  copies.reserve(sources.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (layout.is_staged[i]) write_staging(sources[i], staging, layout.offsets[i]);
    copies.push_back(view_like(sources[i], slab, layout.offsets[i]));
  }
  given->block(stream);
  enqueue_on(stream, slab, options, [&] {
    if (layout.staged != 0) {
      slab.narrow(0, 0, static_cast<std::int64_t>(layout.staged)).copy_(staging, /*non_blocking=*/true);
    }
    for (std::size_t i = 0; i < sources.size(); ++i) {
      if (!layout.is_staged[i]) copies[i].copy_(sources[i], /*non_blocking=*/true);
    }
  });
  return copies;
}

std::vector<at::Tensor> copy_each(c10::ArrayRef<at::Tensor> sources, const c10::Stream& stream,
                                  const BatchCopyOptions& options) {
  const BatchLayout layout(sources, false);
  std::vector<at::Tensor> copies;
  std::vector<at::Tensor> ready = sources.vec();  // pinned tensors, and the staging buffers of the other tensors
  copies.reserve(sources.size());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const at::Tensor& source = sources[i];
    copies.push_back(at::empty_strided(source.sizes(), dense_strides(source),
                                       at::TensorOptions().dtype(source.dtype()).device(stream.device())));
    if (!layout.is_staged[i]) continue;
    const at::Tensor staging = allocate_staging(source.numel() * source.itemsize(), options);
    write_staging(source, staging, 0);
    ready[i] = view_like(source, staging, 0);
  }
  const DeviceSlab allocated(0, stream.device());  // the event behind all the allocations
  allocated.block(stream);
  enqueue_on(stream, copies, options, [&] {
    for (std::size_t i = 0; i < sources.size(); ++i) copies[i].copy_(ready[i], /*non_blocking=*/true);
  });
  return copies;
}

}  // namespace

DeviceSlab::DeviceSlab(std::size_t nbytes, c10::Device device) : DeviceSlab(allocate(nbytes, device)) {}

DeviceSlab::DeviceSlab(at::Tensor memory)
    : memory_(std::move(memory)), allocated_(DeviceEvent::record(current_stream(memory_.device()))) {}

void DeviceSlab::block(const c10::Stream& stream) const {
  if (stands(SyncEdge::batch_slab_wait)) allocated_->block(stream);
}

BatchLayout::BatchLayout(c10::ArrayRef<at::Tensor> tensors, bool pack) {
  offsets.resize(tensors.size());
  is_staged.resize(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const bool is_large = !pack || tensor.nbytes() >= kAlone;
    is_staged[i] = !(is_large && is_plain_memory(tensor) && tensor.is_pinned());
    if (!is_staged[i]) continue;
    offsets[i] = staged;
    staged = aligned(staged + static_cast<std::size_t>(tensor.numel()) * tensor.itemsize());
  }
  nbytes = staged;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (is_staged[i]) continue;
    offsets[i] = nbytes;
    nbytes = aligned(nbytes + tensors[i].nbytes());
  }
}

std::vector<at::Tensor> copy_batch(c10::ArrayRef<at::Tensor> sources, const c10::Stream& stream, const DeviceSlab* slab,
                                   const BatchCopyOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView plain;
  return options.pack ? copy_packed(sources, stream, slab, options) : copy_each(sources, stream, options);
}

}  // namespace cudafuture
