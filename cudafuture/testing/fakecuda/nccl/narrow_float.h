// Floating point numbers of 8 and 16 bits: float16, bfloat16, float8e4m3 and float8e5m2.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace fakenccl {

// A number with `Exponent` and `Mantissa` bits. `Finite` formats have no infinity: all ones is NaN, and what is too
// large becomes the largest number (OCP 8-bit Floating Point Specification, E4M3). `Saturates` says that what is too
// large becomes the largest number though there is an infinity, as CUDA's conversions to 8 bits do by default.
template <typename Bits, int Exponent, int Mantissa, bool Finite, bool Saturates>
class NarrowFloat {
 public:
  NarrowFloat() = default;
  explicit NarrowFloat(float value) : bits_(encode(value)) {}
  explicit operator float() const { return decode(bits_); }

 private:
  static constexpr int kBias = (1 << (Exponent - 1)) - 1;
  static constexpr int kLeast = 1 - kBias;  // the exponent of the smallest normal number
  static constexpr uint32_t kOnes = (1u << (Exponent + Mantissa)) - 1;
  static constexpr uint32_t kInfinity = ((1u << Exponent) - 1) << Mantissa;
  static constexpr uint32_t kLargest = Finite ? kOnes - 1 : kInfinity - 1;
  static constexpr uint32_t kSign = 1u << (Exponent + Mantissa);

  // Round to the nearest number, and to the even one of two.
  static Bits encode(float value) {
    const uint32_t sign = std::signbit(value) ? kSign : 0;
    if (std::isnan(value)) return static_cast<Bits>(sign | kOnes);
    const double size = std::fabs(static_cast<double>(value));
    uint32_t code;
    if (std::isinf(value)) {
      code = kLargest + 1;
    } else if (size == 0) {
      code = 0;
    } else {
      const int exponent = std::max(std::ilogb(size), kLeast);
      // In units of the last place. A carry into the exponent comes out right, because the fields are adjacent.
      const auto units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, Mantissa - exponent)));
      code = (static_cast<uint32_t>(exponent - kLeast) << Mantissa) + units;
    }
    if (code > kLargest) code = Finite || Saturates ? kLargest : kInfinity;
    return static_cast<Bits>(sign | code);
  }

  static float decode(Bits bits) {
    const float sign = (bits & kSign) != 0 ? -1.0f : 1.0f;
    const uint32_t code = bits & kOnes;
    if (code > kLargest) return !Finite && code == kInfinity ? sign * INFINITY : NAN;
    const int exponent = static_cast<int>(code >> Mantissa);
    const uint32_t mantissa = code & ((1u << Mantissa) - 1);
    if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), kLeast - Mantissa);
    return sign * std::ldexp(static_cast<float>(mantissa + (1u << Mantissa)), exponent - kBias - Mantissa);
  }

  Bits bits_ = 0;
};

using Float16 = NarrowFloat<uint16_t, 5, 10, false, false>;
using Bfloat16 = NarrowFloat<uint16_t, 8, 7, false, false>;
using Float8E4M3 = NarrowFloat<uint8_t, 4, 3, true, true>;
using Float8E5M2 = NarrowFloat<uint8_t, 5, 2, false, true>;

}  // namespace fakenccl
