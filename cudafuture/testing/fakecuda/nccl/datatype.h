// Element types and reductions: sizes, names and the reduction of the ranks' chunks.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "fakecuda/nccl/declarations.h"

namespace fakenccl {

// Return the size of an element in bytes, or 0 for an unknown type.
size_t size_of(ncclDataType_t type);

// Return the name of an element type or of a reduction, for messages.
std::string name_of(ncclDataType_t type);
std::string name_of(ncclRedOp_t reduction);

// A reduction as one collective uses it. A user-defined one multiplies each rank's input by that rank's scalar first
// (NCCL user guide, User Defined Reduction Operators).
struct Reduction {
  ncclRedOp_t op = ncclSum;         // a built-in reduction, or ncclNumOps for the user-defined PreMulSum
  unsigned char scalar[8] = {};     // the factor, in the element type
  const void* on_device = nullptr;  // or where it lies, to be read when the collective runs
};

// Multiply `count` elements by the scalar, from `from` to `to`.
void scale(void* to, const void* from, size_t count, ncclDataType_t type, const void* scalar);

// Reduce `count` elements of each input into `to`, in the order of the ranks.
//
// - Half and 8-bit floating point elements are summed in float and rounded once. NCCL rounds at each step of its ring
//   or tree, so a GPU's last bit depends on the topology.
// - ncclAvg divides the sum by the number of ranks; the quotient of integers is truncated.
// - ncclMin and ncclMax ignore NaN, as fminf and fmaxf do.
// - A PreMulSum sums its inputs, because each rank has scaled its own.
void reduce(void* to, const std::vector<const void*>& from, size_t count, ncclDataType_t type, ncclRedOp_t op);

}  // namespace fakenccl
