// Ordering of a consumer's streams after a future.
#pragma once

#include <c10/util/ArrayRef.h>

#include "core/device_memory.h"
#include "core/future.h"
#include "core/sync_edge.h"

namespace cudafuture {

// Makes the calling thread's current streams wait for the events of `future`, and tells the allocator that they use
// `memory` (unless the future holds it).
struct OrderingSyncEdges {
  SyncEdge wait = SyncEdge::wait_stream;
  SyncEdge use = SyncEdge::wait_record_stream;
};
void order_current_streams(const Future& future, c10::ArrayRef<DeviceMemory> memory, OrderingSyncEdges edges = {});

}  // namespace cudafuture
