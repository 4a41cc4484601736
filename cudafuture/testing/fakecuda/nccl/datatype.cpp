#include "fakecuda/nccl/datatype.h"

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "fakecuda/nccl/narrow_float.h"

namespace fakenccl {
namespace {

template <typename T>
constexpr bool is_integer = std::is_integral_v<T>;

// The type in which elements are accumulated. Integers wrap around, so they are accumulated without a sign.
template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <>
struct Accumulator<int64_t> {
  using type = int64_t;
};
template <>
struct Accumulator<uint64_t> {
  using type = uint64_t;
};
template <>
struct Accumulator<int32_t> {
  using type = int32_t;
};
template <>
struct Accumulator<uint32_t> {
  using type = uint32_t;
};
template <>
struct Accumulator<int8_t> {
  using type = int32_t;
};
template <>
struct Accumulator<uint8_t> {
  using type = uint32_t;
};

template <typename A>
A add(A a, A b) {
  if constexpr (is_integer<A>)
    return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) + static_cast<std::make_unsigned_t<A>>(b));
  else
    return a + b;
}

template <typename A>
A multiply(A a, A b) {
  if constexpr (is_integer<A>)
    return static_cast<A>(static_cast<std::make_unsigned_t<A>>(a) * static_cast<std::make_unsigned_t<A>>(b));
  else
    return a * b;
}

template <typename A>
A least(A a, A b) {
  if constexpr (is_integer<A>)
    return b < a ? b : a;
  else
    return std::fmin(a, b);
}

template <typename A>
A greatest(A a, A b) {
  if constexpr (is_integer<A>)
    return a < b ? b : a;
  else
    return std::fmax(a, b);
}

template <typename T, typename Combine>
void reduce_with(T* to, const std::vector<const void*>& from, size_t count, int divisor, Combine combine) {
  using A = typename Accumulator<T>::type;
  for (size_t i = 0; i < count; ++i) {
    A sum = static_cast<A>(static_cast<const T*>(from[0])[i]);
    for (size_t rank = 1; rank < from.size(); ++rank)
      sum = combine(sum, static_cast<A>(static_cast<const T*>(from[rank])[i]));
    if (divisor != 1) sum = sum / static_cast<A>(divisor);
    to[i] = static_cast<T>(sum);
  }
}

template <typename T>
void reduce_typed(void* to, const std::vector<const void*>& from, size_t count, ncclRedOp_t op) {
  using A = typename Accumulator<T>::type;
  auto* out = static_cast<T*>(to);
  const int ranks = static_cast<int>(from.size());
  switch (op) {
    case ncclProd:
      return reduce_with(out, from, count, 1, multiply<A>);
    case ncclMax:
      return reduce_with(out, from, count, 1, greatest<A>);
    case ncclMin:
      return reduce_with(out, from, count, 1, least<A>);
    case ncclAvg:
      return reduce_with(out, from, count, ranks, add<A>);
    default:
      return reduce_with(out, from, count, 1, add<A>);
  }
}

template <typename T>
void scale_typed(void* to, const void* from, size_t count, const void* scalar) {
  using A = typename Accumulator<T>::type;
  const A factor = static_cast<A>(*static_cast<const T*>(scalar));
  for (size_t i = 0; i < count; ++i)
    static_cast<T*>(to)[i] = static_cast<T>(multiply<A>(static_cast<A>(static_cast<const T*>(from)[i]), factor));
}

// Call `f` with a null pointer to the C++ type of the elements.
template <typename F>
void with_type(ncclDataType_t type, F f) {
  switch (type) {
    case ncclInt8:
      return f(static_cast<int8_t*>(nullptr));
    case ncclUint8:
      return f(static_cast<uint8_t*>(nullptr));
    case ncclInt32:
      return f(static_cast<int32_t*>(nullptr));
    case ncclUint32:
      return f(static_cast<uint32_t*>(nullptr));
    case ncclInt64:
      return f(static_cast<int64_t*>(nullptr));
    case ncclUint64:
      return f(static_cast<uint64_t*>(nullptr));
    case ncclFloat16:
      return f(static_cast<Float16*>(nullptr));
    case ncclFloat32:
      return f(static_cast<float*>(nullptr));
    case ncclFloat64:
      return f(static_cast<double*>(nullptr));
    case ncclBfloat16:
      return f(static_cast<Bfloat16*>(nullptr));
    case ncclFloat8e4m3:
      return f(static_cast<Float8E4M3*>(nullptr));
    case ncclFloat8e5m2:
      return f(static_cast<Float8E5M2*>(nullptr));
    default:
      return;
  }
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  size_t size = 0;
  with_type(type, [&](auto* p) { size = sizeof *p; });
  return size;
}

std::string name_of(ncclDataType_t type) {
  static const char* const names[] = {"int8",    "uint8",   "int32",   "uint32",   "int64",      "uint64",
                                      "float16", "float32", "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return type >= 0 && type < ncclNumTypes ? names[type] : "type " + std::to_string(type);
}

std::string name_of(ncclRedOp_t reduction) {
  static const char* const names[] = {"sum", "prod", "max", "min", "avg"};
  return reduction >= 0 && reduction < ncclNumOps ? names[reduction] : "premulsum";
}

void scale(void* to, const void* from, size_t count, ncclDataType_t type, const void* scalar) {
  with_type(type, [&](auto* p) { scale_typed<std::remove_pointer_t<decltype(p)>>(to, from, count, scalar); });
}

void reduce(void* to, const std::vector<const void*>& from, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  with_type(type, [&](auto* p) { reduce_typed<std::remove_pointer_t<decltype(p)>>(to, from, count, op); });
}

}  // namespace fakenccl
