// Prediction of an operator's results, from meta tensors, before it runs.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <memory>

#include "machine/operators/facts.h"

namespace machine {

// Null: only running it will tell.
std::shared_ptr<const Results> infer(const Facts& facts, c10::ArrayRef<c10::IValue> arguments);

}  // namespace machine
