// The exported functions that make, ask and end communicators, and those of groups and reductions.
#include <cuda_runtime_api.h>
#include <string.h>

#include "fakecuda/nccl/creation.h"
#include "fakecuda/nccl/error.h"
#include "fakecuda/nccl/group.h"

using namespace fakenccl;

#define CHECKED(comm) \
  if (const ncclResult_t handle_result = check_handle(comm); handle_result != ncclSuccess) return handle_result

extern "C" {

// torch compares this with the version of the header that it was built with.
ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t comm) {
  thread_local std::string message;
  if (check_not_forked() != ncclSuccess) return "NCCL was called in a child of a process that had used NCCL.";
  message = comm != nullptr && check_handle(comm) == ncclSuccess ? comm->error_message() : last_error();
  return message.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (const ncclResult_t result = check_not_forked(); result != ncclSuccess) return result;
  return make_unique_id(id);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  return create(comm, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  return create(comm, ranks, id, rank, config);
}
// Several ids only make NCCL's initialisation faster; all ranks pass the same ones in the same order.
ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int count, ncclUniqueId* ids,
                                      ncclConfig_t* config) {
  if (count < 1 || ids == nullptr) return note(fail(ncclInvalidArgument, "ncclCommInitRankScalable needs an id."));
  return create(comm, ranks, ids[0], rank, config);
}
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  if (const ncclResult_t result = check_not_forked(); result != ncclSuccess) return result;
  return create_all(comms, count, devices);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  return split(comm, color, key, child, config);
}
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* child, ncclConfig_t* config,
                            int flags) {
  return shrink(comm, excluded, count, child, config, flags);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  CHECKED(comm);
  if (const ncclResult_t result = comm->check_usable(); result != ncclSuccess) return result;
  if (comm->finalized) return fail(ncclInvalidArgument, "The communicator was finalized before.");
  comm->finalized = true;
  return comm->run_job([comm] { return comm->wait_kernels(); });
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  CHECKED(comm);
  if (comm->ended) return fail(ncclInvalidArgument, "The communicator was destroyed or aborted before.");
  comm->wait_idle();
  comm->leave(Membership::left);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;
  CHECKED(comm);
  if (comm->ended) return fail(ncclInvalidArgument, "The communicator was destroyed or aborted before.");
  comm->leave(Membership::aborted);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  CHECKED(comm);
  return *error = comm->async_error(), ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  CHECKED(comm);
  return *count = comm->ranks, ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  CHECKED(comm);
  return *rank = comm->rank, ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  CHECKED(comm);
  return *device = comm->device, ncclSuccess;
}

ncclResult_t ncclGroupStart() { return start_group(); }
ncclResult_t ncclGroupEnd() { return end_group(false); }
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* info) {
  if (info != nullptr) info->estimatedTime = 0;
  return end_group(true);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t comm) {
  CHECKED(comm);
  const size_t size = size_of(type);
  if (size == 0 || scalar == nullptr)
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: unknown type or NULL.");
  Reduction reduction;
  reduction.op = ncclNumOps;
  if (residence == ncclScalarDevice)
    reduction.on_device = scalar;
  else
    memcpy(reduction.scalar, scalar, size);
  const std::lock_guard lock(comm->issue_mutex);
  comm->reductions.push_back(reduction);
  comm->reduction_types.push_back(type);
  *op = static_cast<ncclRedOp_t>(ncclNumOps + comm->reductions.size() - 1);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  CHECKED(comm);
  if (op < ncclNumOps || op - ncclNumOps >= static_cast<int>(comm->reductions.size()))
    return fail(ncclInvalidArgument, "Reduction " + std::to_string(op) + " is not one of the communicator's.");
  return ncclSuccess;
}

// Memory of NCCL and registered buffers are only faster than others on a GPU.
ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) == cudaSuccess ? ncclSuccess : fail(ncclUnhandledCudaError, "cudaMalloc failed.");
}
ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : fail(ncclUnhandledCudaError, "cudaFree failed.");
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t, void** handle) {
  CHECKED(comm);
  return *handle = buffer, ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  CHECKED(comm);
  return ncclSuccess;
}

ncclResult_t ncclCommSuspend(ncclComm_t comm, int) {
  CHECKED(comm);
  return comm->suspended = true, ncclSuccess;
}
ncclResult_t ncclCommResume(ncclComm_t comm) {
  CHECKED(comm);
  return comm->suspended = false, ncclSuccess;
}
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t, uint64_t* value) {
  CHECKED(comm);
  return *value = 0, ncclSuccess;
}

}  // extern "C"
