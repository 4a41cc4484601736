#include "core/stream_order.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "core/stream_pool.h"

namespace cudafuture {

void order_current_streams(const Future& future, c10::ArrayRef<DeviceMemory> memory, OrderingSyncEdges edges) {
  if (stands(edges.wait)) future.events().block_current_streams();
  if (future.lifetime() == Lifetime::hold || !stands(edges.use)) return;
  std::optional<c10::Stream> current;  // of the last tensor's device: usually all are on one device
  for (const DeviceMemory& used : memory) {
    if (!used.storage) continue;
    if (!current || current->device() != used.device) {
      if (!has_streams(used.device)) continue;
      current = current_stream(used.device);
    }
    const c10::impl::VirtualGuardImpl guard(used.device.type());
    guard.recordDataPtrOnStream(used.storage.data_ptr(), *current);
  }
}

}  // namespace cudafuture
