#include "fakecuda/nccl/operation.h"

namespace fakenccl {
namespace {

const char* name_of(NcclOperationKind kind) {
  static const char* const names[] = {"AllReduce", "Broadcast", "Reduce",  "AllGather", "ReduceScatter",
                                      "AlltoAll",  "Gather",    "Scatter", "Send",      "Recv"};
  return names[static_cast<int>(kind)];
}

bool reduces(NcclOperationKind kind) {
  return kind == NcclOperationKind::all_reduce || kind == NcclOperationKind::reduce ||
         kind == NcclOperationKind::reduce_scatter;
}

bool has_root(NcclOperationKind kind) {
  return kind == NcclOperationKind::broadcast || kind == NcclOperationKind::reduce ||
         kind == NcclOperationKind::gather || kind == NcclOperationKind::scatter;
}

}  // namespace

Descriptor NcclOperation::descriptor() const {
  Descriptor d;
  d.kind = static_cast<int32_t>(kind);
  d.type = type;
  d.reduction = reduces(kind) ? reduction.op : 0;
  d.root = has_root(kind) ? root : 0;
  d.count = count;
  d.number = number;
  d.discarded = discarded;
  return d;
}

std::string describe(const Descriptor& d) {
  const NcclOperationKind kind = static_cast<NcclOperationKind>(d.kind);
  std::string text = std::string(name_of(kind)) + "(count=" + std::to_string(d.count) +
                     ", type=" + name_of(static_cast<ncclDataType_t>(d.type));
  if (reduces(kind)) text += ", reduction=" + name_of(static_cast<ncclRedOp_t>(d.reduction));
  if (has_root(kind)) text += ", root=" + std::to_string(d.root);
  text += ")";
  if (d.discarded != 0) text += " after " + std::to_string(d.discarded) + " empty collectives";
  return text;
}

std::vector<MemoryAccess> accesses_of(const NcclOperation& o, int rank, int ranks) {
  const size_t one = o.bytes();
  const size_t all = one * ranks;
  const bool root = o.root == rank;
  size_t reads = one;
  size_t writes = one;
  switch (o.kind) {
    case NcclOperationKind::all_reduce:
      break;
    case NcclOperationKind::broadcast:
      reads = root ? one : 0;
      break;
    case NcclOperationKind::reduce:
      writes = root ? one : 0;
      break;
    case NcclOperationKind::all_gather:
      writes = all;
      break;
    case NcclOperationKind::reduce_scatter:
      reads = all;
      break;
    case NcclOperationKind::all_to_all:
      reads = writes = all;
      break;
    case NcclOperationKind::gather:
      writes = root ? all : 0;
      break;
    case NcclOperationKind::scatter:
      reads = root ? all : 0;
      break;
    case NcclOperationKind::send:
      writes = 0;
      break;
    case NcclOperationKind::receive:
      reads = 0;
      break;
  }
  std::vector<MemoryAccess> accesses;
  if (reads != 0) accesses.push_back(MemoryAccess::of(o.send, reads, false));
  if (writes != 0) accesses.push_back(MemoryAccess::of(o.receive, writes, true));
  if (o.reduction.on_device != nullptr) {
    accesses.push_back(MemoryAccess::of(o.reduction.on_device, size_of(o.type), false));
  }
  return accesses;
}

// NCCL leaves a mismatch undefined: it hangs or corrupts memory (NCCL user guide, Collective Operations: each rank has
// to call with the same count and the same datatype). Here both ranks get an error that names both calls.
void report_mismatch(ncclComm& communicator, int rank, const Descriptor& own, int peer, const Descriptor& theirs) {
  const bool ordered = rank < peer;
  communicator.set_async_error(
      ncclInvalidUsage, "Mismatch in operation " + std::to_string(own.number) + " of communicator " +
                            communicator.name.substr(0, 8) + ": rank " + std::to_string(ordered ? rank : peer) +
                            " called " + describe(ordered ? own : theirs) + ", but rank " +
                            std::to_string(ordered ? peer : rank) + " called " + describe(ordered ? theirs : own) +
                            ". All ranks have to issue the same operations in the same order.");
}

}  // namespace fakenccl
