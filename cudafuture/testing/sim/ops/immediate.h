// Operators whose results cannot be predicted: the host waits for the stream and runs the kernel itself.
#pragma once

#include <c10/util/ArrayRef.h>

#include "machine/operators/facts.h"
#include "machine/operators/values.h"

namespace sim {

using namespace machine;

// The new results, on the device.
Values run_now(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, int device);

}  // namespace sim
