// What an operator will return, found out on meta tensors, before it has run.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <memory>

#include "ops/facts.h"

namespace sim {

// Null: only running it will tell.
std::shared_ptr<const Results> infer(const Facts& facts, c10::ArrayRef<c10::IValue> arguments);

}  // namespace sim
