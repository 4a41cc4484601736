// Computation on a simulated device: the host's kernel for an operator becomes work in a stream.
//
//     called ─► one device? ─► what will it return? ─┬─► known: memory for it, OperatorTask ─► submit   returns at once
//                                                    └─► only running tells: wait, run, copy to memory   the host waits
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>

#include <functional>

#include "machine/operators/facts.h"
#include "machine/operators/values.h"
#include "sim/ops/access_list.h"
#include "sim/runtime/accelerator.h"

namespace sim {

// Takes the arguments of `op` off the stack and puts its results there.
void run_on_device(const Facts& op, Values* stack);

// For operators that have no kernel of our own.
void fall_back(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Values* stack);

// Work in the current stream of the device.
void enqueue(int device, const char* name, std::function<void()> run, AccessList&& accesses,
             WorkKind kind = WorkKind::compute);

}  // namespace sim
