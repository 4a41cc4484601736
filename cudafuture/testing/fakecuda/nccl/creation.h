// The ways to make communicators: from a unique id, and from another communicator.
#pragma once

#include "fakecuda/nccl/communicator.h"

namespace fakenccl {

ncclResult_t make_unique_id(ncclUniqueId* id);

// Make a communicator of the ranks that pass the same id.
ncclResult_t create(ncclComm_t* communicator, int ranks, const ncclUniqueId& id, int rank, const ncclConfig_t* config);

// Make a communicator for each device of a list, in this process.
ncclResult_t create_all(ncclComm_t* communicators, int count, const int* devices);

// Make communicators of the parent's ranks with the same color.
ncclResult_t split(ncclComm_t parent, int color, int key, ncclComm_t* child, const ncclConfig_t* config);

// Make a communicator of the parent's ranks that are not in the list.
ncclResult_t shrink(ncclComm_t parent, const int* excluded, int count, ncclComm_t* child, const ncclConfig_t* config,
                    int flags);

}  // namespace fakenccl
