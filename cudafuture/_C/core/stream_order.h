// Ordering of a consumer's streams after a future, and of the memory that they use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/util/ArrayRef.h>

#include <utility>

#include "core/future.h"
#include "core/sync_edge.h"

namespace cudafuture {

// The storage that a tensor occupies on its device. A copy of a tensor can cost more than the storage: where Python
// knows the tensor, reference counting enters the interpreter.
struct DeviceMemory {
  DeviceMemory(const at::Tensor& tensor)  // NOLINT(google-explicit-constructor): accepts a tensor
      : device(tensor.device()), storage(tensor.has_storage() ? tensor.storage() : c10::Storage()) {}
  DeviceMemory(c10::Device device, c10::Storage storage) : device(device), storage(std::move(storage)) {}

  c10::Device device;
  c10::Storage storage;  // none: unknown to the allocator
};

// Makes the calling thread's current streams wait for the events of `future`, and tells the allocator that they use
// `memory` (unless the future holds it).
struct OrderingSyncEdges {
  SyncEdge wait = SyncEdge::wait_stream;
  SyncEdge use = SyncEdge::wait_record_stream;
};
void order_current_streams(const Future& future, c10::ArrayRef<DeviceMemory> memory, OrderingSyncEdges edges = {});

}  // namespace cudafuture
