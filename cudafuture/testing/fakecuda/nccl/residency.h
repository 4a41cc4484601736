// The channels of the devices. A kernel that waits for its peers occupies its channels, so where they are exhausted the
// kernels of other communicators cannot start. Two ranks that launch two communicators in different orders then wait
// for each other (NCCL user guide, Using multiple NCCL communicators concurrently).
//
// FAKENCCL_CHANNELS=N lets at most N kernels of the process run on each device. 0, the default, sets no limit.
#pragma once

namespace fakenccl {

// Let one more kernel run on the device, and return true; or return false where all channels are in use.
bool take_channel(int device);
// Release it, and return whether another kernel may wait for it.
bool release_channel(int device);

}  // namespace fakenccl

// Return how many kernels run on a device, those that wait for their peers included.
extern "C" int fakenccl_running_kernels(int device);
