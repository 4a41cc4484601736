// The exported collectives and point-to-point operations.
#include "fakecuda/nccl/error.h"
#include "fakecuda/nccl/group.h"

using namespace fakenccl;

namespace {

ncclResult_t collective(NcclOperationKind kind, const void* send, void* receive, size_t count, ncclDataType_t type,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  NcclOperation operation;
  operation.kind = kind;
  operation.send = send;
  operation.receive = receive;
  operation.count = count;
  operation.type = type;
  operation.root = root;
  return issue(comm, std::move(operation), stream);
}

// An operator that was made for one type is refused for another (NCCL user guide, ncclRedOpCreatePreMulSum).
ncclResult_t resolve(ncclRedOp_t op, ncclDataType_t type, ncclComm_t comm, Reduction* reduction) {
  reduction->op = op;
  if (op >= 0 && op < ncclNumOps) return ncclSuccess;
  const std::lock_guard lock(comm->issue_mutex);
  const size_t index = static_cast<size_t>(op) - ncclNumOps;
  if (op < 0 || index >= comm->reductions.size())
    return fail(ncclInvalidArgument, "There is no reduction " + std::to_string(op) + ".");
  if (comm->reduction_types[index] != type)
    return fail(ncclInvalidArgument, "The reduction was created for " + name_of(comm->reduction_types[index]) +
                                         ", but the elements are " + name_of(type) + ".");
  *reduction = comm->reductions[index];
  return ncclSuccess;
}

ncclResult_t reduction(NcclOperationKind kind, const void* send, void* receive, size_t count, ncclDataType_t type,
                       ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  NcclOperation operation;
  ncclResult_t result = check_handle(comm);
  if (result == ncclSuccess) result = resolve(op, type, comm, &operation.reduction);
  if (result != ncclSuccess) return note(result);
  operation.kind = kind;
  operation.send = send;
  operation.receive = receive;
  operation.count = count;
  operation.type = type;
  operation.root = root;
  return issue(comm, std::move(operation), stream);
}

}  // namespace

extern "C" {

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return reduction(NcclOperationKind::all_reduce, send, receive, count, type, op, 0, comm, stream);
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return reduction(NcclOperationKind::reduce, send, receive, count, type, op, root, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return reduction(NcclOperationKind::reduce_scatter, send, receive, count, type, op, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return collective(NcclOperationKind::broadcast, send, receive, count, type, root, comm, stream);
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return collective(NcclOperationKind::broadcast, buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return collective(NcclOperationKind::all_gather, send, receive, count, type, 0, comm, stream);
}
ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t stream) {
  return collective(NcclOperationKind::all_to_all, send, receive, count, type, 0, comm, stream);
}
ncclResult_t ncclGather(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                        cudaStream_t stream) {
  return collective(NcclOperationKind::gather, send, receive, count, type, root, comm, stream);
}
ncclResult_t ncclScatter(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                         cudaStream_t stream) {
  return collective(NcclOperationKind::scatter, send, receive, count, type, root, comm, stream);
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return collective(NcclOperationKind::send, send, nullptr, count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return collective(NcclOperationKind::receive, nullptr, receive, count, type, peer, comm, stream);
}

}  // extern "C"
