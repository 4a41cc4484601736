// The sync edges that the library makes, each with a name. A sync edge orders a consumer after a producer on a device.
//
// Tests cut one edge at a time, to show that they would notice a missing edge. Nothing else cuts edges. While no edge
// is cut, the check is a load and a comparison.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cudafuture {

// The names that tests use, "result.record" and so on, are in sync_edge.cpp, in this order.
enum class SyncEdge : std::uint8_t {
  none,

  // events that are recorded, or kept, when a future is done
  result_record,
  result_stream,   // on the streams that set_result(stream=) names
  result_tensors,  // consumers use the tensors that set_result(tensors=) names
  failure_record,
  then_record,
  then_failure_record,
  then_async_events,
  then_async_failure_events,
  gather_events,
  gather_failure_events,
  gather_tensors,
  join_wait,
  join_record,
  any_events,
  any_failure_events,
  from_torch_record,
  work_events,
  work_record,  // after a Work whose future knows no devices

  // streams that wait
  wait_stream,
  wait_record_stream,
  then_stream,
  then_record_stream,
  to_torch_stream,
  event_wait,
  event_to_torch_wait,
  event_to_torch_record,

  // the host waits
  host_query,
  then_when_ready,
  event_synchronize,

  // the current device and streams in callbacks and in use_streams(), and afterwards
  scope_enter,
  scope_leave,
  scope_device,
  caller_device,

  // the event's own device is current
  guard_record,
  guard_block,
  guard_query,
  guard_synchronize,
  guard_destroy,
  guard_to_torch,

  // in io
  io_source_wait,    // a write begins when the work that its caller had enqueued has finished
  io_source_copied,  // a buffer goes to the disk when the device has filled it
  io_target_wait,
  io_target_record_stream,
  io_target_copied,  // a buffer is reused when the device has read it
  io_read_record,
  io_failure_record,
  io_buffer_record,  // a pool lends memory again when the devices have finished with it

  // the tensors of a batch
  batch_slab_wait,      // a copy begins when the memory's owner has finished with it
  batch_record_stream,  // memory is not reused before the copy into it has finished

  // in Python
  copy_source_wait,
  copy_source_record_stream,
  copy_target_wait,
  copy_target_record_stream,
  copy_done_record,
  staging_out_wait,
  staging_out_record_stream,
  staging_out_done,
  staging_in_wait,
  staging_in_record_stream,
  staging_in_record,
  prefetch_loader_wait,    // a batch is ready when the work that its loader enqueued has finished
  prefetch_ready_record,   // on the copy stream
  prefetch_record_stream,  // memory that is not the consumer's is not reused before the consumer has finished
  prefetch_drop_wait,      // memory of a batch that was never taken is not reused before the copy has finished
  pipeline_wait_stream,    // one stream of a pipeline waits for another; the other way round in the backward pass
  pipeline_record_stream,  // memory of a micro-batch is not reused before the other stream has finished

  count,
};

extern std::atomic<SyncEdge> cut_sync_edge;

inline bool stands(SyncEdge edge) noexcept { return cut_sync_edge.load(std::memory_order_relaxed) != edge; }

std::string_view name_of(SyncEdge edge) noexcept;
SyncEdge sync_edge_of(std::string_view name) noexcept;  // none: no edge has that name

}  // namespace cudafuture
