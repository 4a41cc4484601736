// The arguments of a call, without the contents of tensors, as numbers: calls with the same signature have results of
// the same shapes.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace machine {

struct Facts;
using Signature = c10::SmallVector<std::int64_t, 40>;

// False: there is something among the arguments that has no signature.
bool write_signature(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, Signature& signature);

struct HashSignature {
  std::size_t operator()(const Signature& signature) const noexcept {
    std::uint64_t hash = signature.size();
    for (const std::int64_t word : signature) {
      hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

template <class T>
using SignatureMap = std::unordered_map<Signature, T, HashSignature>;

}  // namespace machine
