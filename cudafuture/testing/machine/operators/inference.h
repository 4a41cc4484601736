// Prediction of an operator's results, from meta tensors, before it runs.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <memory>

#include "machine/operators/facts.h"

namespace machine {

// Kernels whose results are predicted. The meta kernels follow CUDA's, which differ from the host's in places.
enum class Kernels { host, cuda };

// Null: only running it will tell.
std::shared_ptr<const Results> infer(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, Kernels kernels);

}  // namespace machine
