// Element types on the wire and in user buffers, and the 16-bit floats that C++17 lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/clones.h"

namespace qsgd {

enum class DType : uint8_t {
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};

constexpr int kDTypes = 9;
constexpr float kLargestFloat = std::numeric_limits<float>::max();

struct DTypeFacts {
  const char* name;
  size_t size;
  bool floating;
};

// Throws. The GPU kernels, which must not depend on a C++ library, define it to end the process.
[[noreturn]] void refuse_unknown(DType t);

inline const DTypeFacts& facts(DType t) {
  static constexpr DTypeFacts kTable[kDTypes] = {
      {"uint8", 1, false},   {"int8", 1, false},   {"int16", 2, false},
      {"int32", 4, false},   {"int64", 8, false},  {"float16", 2, true},
      {"bfloat16", 2, true}, {"float32", 4, true}, {"float64", 8, true},
  };
  const auto index = static_cast<size_t>(t);
  if (index >= kDTypes) refuse_unknown(t);
  return kTable[index];
}

// Always inlined: a call would prevent vectorisation of loops in function clones. Not std::memcpy,
// which hipcc treats as a host function.
template <class To, class From>
QSGD_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// |x| as an integer: ordered like the floats; kInfinity and above are Inf or NaN.
QSGD_INLINE uint32_t magnitude_bits(float x) { return bit_cast<uint32_t>(x) & 0x7fffffffu; }
constexpr uint32_t kInfinity = 0x7f800000u;

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  QSGD_INLINE explicit BFloat16(float x) {
    const auto u = bit_cast<uint32_t>(x);
    if (magnitude_bits(x) > kInfinity) {
      bits = static_cast<uint16_t>((u >> 16) | 0x40u);  // rounding could turn NaN into Inf
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  QSGD_INLINE explicit operator float() const {
    return bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

struct Float16 {
  uint16_t bits;
  Float16() = default;
  QSGD_INLINE explicit Float16(float x) {
    const auto u = bit_cast<uint32_t>(x);
    const auto sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
    const uint32_t magnitude = magnitude_bits(x);
    if (magnitude >= 0x47800000u) {  // 65536 and beyond, Inf, NaN
      bits = static_cast<uint16_t>(sign | (magnitude > kInfinity ? 0x7e00u : 0x7c00u));
    } else if (magnitude < 0x38800000u) {  // subnormal: let the FPU round to multiples of 2^-24
      const float shifted = bit_cast<float>(magnitude) + 0.5f;
      bits = static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3f000000u));
    } else {
      const uint32_t odd = (magnitude >> 13) & 1u;
      bits = static_cast<uint16_t>(sign | ((magnitude + 0xc8000fffu + odd) >> 13));
    }
  }
  QSGD_INLINE explicit operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t fraction = bits & 0x3ffu;
    if (exponent == 0) {
      const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
      return bit_cast<float>(bit_cast<uint32_t>(magnitude) | sign);
    }
    const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112u;
    return bit_cast<float>(sign | (wide << 23) | (fraction << 13));
  }
};

// Calls f with a value of the C++ type for `t`.
template <class F>
decltype(auto) dispatch(DType t, F&& f) {
  switch (t) {
    case DType::kUint8:
      return f(uint8_t{});
    case DType::kInt8:
      return f(int8_t{});
    case DType::kInt16:
      return f(int16_t{});
    case DType::kInt32:
      return f(int32_t{});
    case DType::kInt64:
      return f(int64_t{});
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
  }
  refuse_unknown(t);
}

}  // namespace qsgd
