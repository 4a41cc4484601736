#include "fakecuda/nccl/group.h"

#include <thread>

#include "fakecuda/nccl/error.h"
#include "fakecuda/nccl/kernel.h"

namespace fakenccl {
namespace {

struct GroupEntry {
  ncclComm* communicator;
  NcclOperation operation;
  cudaStream_t stream;
};

struct GroupJob {
  ncclComm* communicator;
  std::function<ncclResult_t()> run;
};

struct NcclGroup {
  int depth = 0;
  std::vector<GroupEntry> entries;
  std::vector<GroupJob> jobs;
  ncclResult_t error = ncclSuccess;
};

thread_local NcclGroup group;

// A default stream stands for another stream on each device, so the device has to be current while it is used.
class CurrentDevice {
 public:
  CurrentDevice(int device, cudaStream_t stream) {
    if (reinterpret_cast<uintptr_t>(stream) > 2) return;
    cudaGetDevice(&before_);
    if (before_ == device) before_ = -1;
    if (before_ >= 0) cudaSetDevice(device);
  }
  ~CurrentDevice() {
    if (before_ >= 0) cudaSetDevice(before_);
  }

 private:
  int before_ = -1;
};

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

void order(cudaStream_t first, cudaStream_t second) {
  cudaEvent_t event = nullptr;
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  cudaEventRecord(event, first);
  cudaStreamWaitEvent(second, event, 0);
  cudaEventDestroy(event);
}

// Give the operations their numbers. Empty collectives are discarded, as NCCL does: they wait for no rank.
std::vector<NcclOperation> number(ncclComm* communicator, std::vector<NcclOperation> operations) {
  std::vector<NcclOperation> kept;
  for (NcclOperation& o : operations) {
    if (o.kind == NcclOperationKind::send) {
      o.number = ++communicator->sends_issued[o.root];
    } else if (o.kind == NcclOperationKind::receive) {
      o.number = ++communicator->receives_issued[o.root];
    } else if (o.count == 0) {
      ++communicator->collectives_discarded;
      continue;
    } else {
      o.number = ++communicator->collectives_issued;
      o.discarded = communicator->collectives_discarded;
    }
    kept.push_back(std::move(o));
  }
  return kept;
}

// NCCL returns ncclInvalidUsage where a message to oneself has no counterpart in its group.
ncclResult_t check_own_messages(const ncclComm& communicator, const std::vector<NcclOperation>& operations) {
  int balance = 0;
  for (const NcclOperation& o : operations)
    if (o.point_to_point() && o.root == communicator.rank) balance += o.kind == NcclOperationKind::send ? 1 : -1;
  if (balance == 0) return ncclSuccess;
  return fail(ncclInvalidUsage, "Rank " + std::to_string(communicator.rank) + " sends to itself without a matching " +
                                    "receive, or receives without a send. Issue both in one group.");
}

// Launch what a group issued on one communicator. Where it used several streams, the kernel runs on the first one,
// after the work of all and before what follows on them (NCCL user guide, Using NCCL with CUDA streams: Mixing
// Multiple Streams within the same ncclGroupStart/End() group).
ncclResult_t launch_all(ncclComm* communicator, std::vector<NcclOperation> operations,
                        std::vector<cudaStream_t> streams) {
  if (const ncclResult_t result = check_own_messages(*communicator, operations); result != ncclSuccess) return result;
  const std::lock_guard lock(communicator->issue_mutex);
  operations = number(communicator, std::move(operations));
  if (operations.empty()) return ncclSuccess;
  const CurrentDevice device(communicator->device, streams.front());
  for (size_t i = 1; i < streams.size(); ++i) order(streams[i], streams.front());
  launch(communicator, std::move(operations), streams.front(), is_capturing(streams.front()));
  for (size_t i = 1; i < streams.size(); ++i) order(streams.front(), streams[i]);
  return ncclSuccess;
}

ncclResult_t launch_entries(std::vector<GroupEntry> entries) {
  while (!entries.empty()) {
    ncclComm* communicator = entries.front().communicator;
    std::vector<NcclOperation> operations;
    std::vector<cudaStream_t> streams;
    std::vector<GroupEntry> others;
    for (GroupEntry& entry : entries) {
      if (entry.communicator != communicator) {
        others.push_back(std::move(entry));
        continue;
      }
      operations.push_back(std::move(entry.operation));
      if (std::find(streams.begin(), streams.end(), entry.stream) == streams.end()) streams.push_back(entry.stream);
    }
    const ncclResult_t result = launch_all(communicator, std::move(operations), std::move(streams));
    if (result != ncclSuccess) return result;
    entries = std::move(others);
  }
  return ncclSuccess;
}

// The jobs of a group run at once, because each may wait for a rank that another one initialises.
ncclResult_t run_jobs(const std::vector<GroupJob>& jobs) {
  std::vector<ncclResult_t> results(jobs.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < jobs.size(); ++i)
    threads.emplace_back([&, i] { results[i] = jobs[i].communicator->run_job(jobs[i].run); });
  for (std::thread& thread : threads) thread.join();
  ncclResult_t first = ncclSuccess;
  for (const ncclResult_t result : results)
    if (first == ncclSuccess || (first == ncclInProgress && result != ncclSuccess)) first = result;
  return first;
}

ncclResult_t check_operation(const ncclComm& communicator, const NcclOperation& o, cudaStream_t stream) {
  const std::string call = describe(o.descriptor());
  if (size_of(o.type) == 0) return fail(ncclInvalidArgument, call + ": unknown datatype.");
  if (o.root < 0 || o.root >= communicator.ranks)
    return fail(ncclInvalidArgument, call + ": rank " + std::to_string(o.root) + " is not in a communicator of " +
                                         std::to_string(communicator.ranks) + " ranks.");
  for (const MemoryAccess& access : accesses_of(o, communicator.rank, communicator.ranks))
    if (access.begin == 0 && access.end != 0)
      return fail(ncclInvalidArgument, call + ": the " + (access.writes ? "receive" : "send") + " buffer is NULL.");
  if (reinterpret_cast<uintptr_t>(stream) <= 2) return ncclSuccess;
  const int device = fakecuda_stream_device(stream);
  if (device == communicator.device) return ncclSuccess;
  return fail(ncclUnhandledCudaError, call + ": the communicator is on device " + std::to_string(communicator.device) +
                                          ", but the stream is on device " + std::to_string(device) + ".");
}

}  // namespace

ncclResult_t note(ncclResult_t result) {
  if (group.depth > 0 && group.error == ncclSuccess && result != ncclInProgress) group.error = result;
  return result;
}

ncclResult_t issue(ncclComm_t communicator, NcclOperation operation, cudaStream_t stream) {
  ncclResult_t result = check_handle(communicator);
  if (result == ncclSuccess) result = communicator->check_usable();
  if (result == ncclSuccess && (communicator->finalized || communicator->suspended))
    result = fail(ncclInvalidUsage,
                  communicator->finalized ? "The communicator was finalized." : "The communicator is suspended.");
  if (result == ncclSuccess) result = check_operation(*communicator, operation, stream);
  if (result != ncclSuccess) return note(result);
  if (group.depth == 0) return launch_all(communicator, {std::move(operation)}, {stream});
  group.entries.push_back({communicator, std::move(operation), stream});
  return ncclSuccess;
}

ncclResult_t issue(ncclComm_t communicator, std::function<ncclResult_t()> job) {
  if (group.depth == 0) return communicator->run_job(std::move(job));
  group.jobs.push_back({communicator, std::move(job)});
  return ncclSuccess;
}

ncclResult_t start_group() {
  if (const ncclResult_t result = check_not_forked(); result != ncclSuccess) return result;
  ++group.depth;
  return ncclSuccess;
}

ncclResult_t end_group(bool simulate) {
  if (const ncclResult_t result = check_not_forked(); result != ncclSuccess) return result;
  if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd was called without ncclGroupStart.");
  if (--group.depth > 0) return ncclSuccess;
  NcclGroup ended;
  std::swap(ended, group);
  if (ended.error != ncclSuccess || simulate) return ended.error;
  const ncclResult_t result = run_jobs(ended.jobs);
  if (result != ncclSuccess && result != ncclInProgress) return result;
  const ncclResult_t launched = launch_entries(std::move(ended.entries));
  return launched != ncclSuccess ? launched : result;
}

}  // namespace fakenccl
