// Processes of ranks: whether one is alive, and messages to wake it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>

namespace fakenccl {

// Return the time at which a process started, in clock ticks since boot, or 0 where there is no such process.
uint64_t start_time(pid_t pid);

// Return whether the process that started at `started` still runs. Another process with the same pid does not count.
bool is_alive(pid_t pid, uint64_t started);

// Watch a process and call `died` once from the library's thread when it has ended. Return a token for unwatch.
uint64_t watch(pid_t pid, uint64_t started, std::function<void()> died);
void unwatch(uint64_t token);

// Wake the library's thread of another process.
void ring(pid_t pid, uint64_t started);

// Set the function that the library's thread calls when it is woken, and start the thread.
void start_doorbell(std::function<void()> woken);

}  // namespace fakenccl
