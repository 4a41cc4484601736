#include "core/sync_edge.h"

#include <algorithm>
#include <iterator>

namespace cudafuture {
namespace {

constexpr std::string_view kNames[] = {
    "none",
    "result.record",
    "result.stream",
    "result.tensors",
    "failure.record",
    "then.record",
    "then.failure_record",
    "then_async.events",
    "then_async.failure_events",
    "gather.events",
    "gather.failure_events",
    "gather.tensors",
    "join.wait",
    "join.record",
    "any.events",
    "any.failure_events",
    "from_torch.record",
    "work.events",
    "work.record",
    "wait.stream",
    "wait.record_stream",
    "then.stream",
    "then.record_stream",
    "to_torch.stream",
    "event.wait",
    "event.to_torch_wait",
    "event.to_torch_record",
    "host.query",
    "then.when_ready",
    "event.synchronize",
    "scope.enter",
    "scope.leave",
    "scope.device",
    "caller.device",
    "guard.record",
    "guard.block",
    "guard.query",
    "guard.synchronize",
    "guard.destroy",
    "guard.to_torch",
    "io.source_wait",
    "io.source_copied",
    "io.target_wait",
    "io.target_record_stream",
    "io.target_copied",
    "io.read_record",
    "io.failure_record",
    "io.buffer_record",
    "batch.slab_wait",
    "batch.record_stream",
    "copy.source_wait",
    "copy.source_record_stream",
    "copy.target_wait",
    "copy.target_record_stream",
    "copy.done_record",
    "staging.out_wait",
    "staging.out_record_stream",
    "staging.out_done",
    "staging.in_wait",
    "staging.in_record_stream",
    "staging.in_record",
    "prefetch.loader_wait",
    "prefetch.ready_record",
    "prefetch.record_stream",
    "prefetch.drop_wait",
    "pipeline.wait_stream",
    "pipeline.record_stream",
};
static_assert(std::size(kNames) == static_cast<std::size_t>(SyncEdge::count));

}  // namespace

std::atomic<SyncEdge> cut_sync_edge{SyncEdge::none};

std::string_view name_of(SyncEdge edge) noexcept { return kNames[static_cast<std::size_t>(edge)]; }

SyncEdge sync_edge_of(std::string_view name) noexcept {
  const auto found = std::find(std::begin(kNames), std::end(kNames), name);
  return found == std::end(kNames) ? SyncEdge::none : static_cast<SyncEdge>(found - std::begin(kNames));
}

}  // namespace cudafuture
