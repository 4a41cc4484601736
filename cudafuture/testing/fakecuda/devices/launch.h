// Functions on the streams of the machine, for what stands beside the CUDA runtime: operators/ and nccl/. They are in
// cudart/stream.cpp.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "machine/shadow.h"

extern "C" {

// Enqueue an operation on a stream (a cudaStream_t; nullptr is the current device's default stream). The machine calls
// `kernel` once, at the operation's place in the stream, from any thread and without a lock. An exception of `kernel`
// breaks the device, as a failed assertion in a kernel does (cudaErrorAssert). `name` appears in reports.
void fakecuda_launch(void* stream, const char* name, std::vector<machine::MemoryAccess> accesses,
                     std::function<void()> kernel);

// Enqueue an operation that occupies its stream until `attempt` returns true. The machine calls `attempt` from one
// thread at a time: when the operation reaches the front of its stream, after fakecuda_wake(), and at least each
// millisecond. `attempt` must not block.
void fakecuda_launch_until(void* stream, const char* name, std::vector<machine::MemoryAccess> accesses,
                           std::function<bool()> attempt);

// Have the machine call the attempts of waiting operations now.
void fakecuda_wake();

// Return the address at which the host can reach `size` bytes of device memory at `pointer`, or `pointer` itself where
// it is memory of the host.
void* fakecuda_host_pointer(const void* pointer, size_t size);

// Return the index of the device that a stream belongs to, or -1 where there is no such stream.
int fakecuda_stream_device(void* stream);
}
