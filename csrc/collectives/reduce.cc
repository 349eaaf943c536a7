#include "collectives/reduce.h"

#include <cmath>
#include <type_traits>

#include "common/clones.h"
#include "common/error.h"

namespace qsgd {
namespace {

// 16-bit floats compute in float32, as hardware does.
template <class T>
using Wide =
    std::conditional_t<std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>, float, T>;

template <class T, class F>
void combine(T* into, const T* from, size_t count, F&& f) {
  for (size_t i = 0; i < count; ++i) {
    into[i] = static_cast<T>(f(static_cast<Wide<T>>(from[i]), static_cast<Wide<T>>(into[i])));
  }
}

template <class T>
void reduce_typed(T* into, const T* from, size_t count, ReduceOp op) {
  using W = Wide<T>;
  // Min and max also propagate NaN, which must not disappear in a reduction.
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return combine(into, from, count, [](W a, W b) { return static_cast<W>(a + b); });
    case ReduceOp::kMin:
      return combine(into, from, count, [](W a, W b) { return a < b || a != a ? a : b; });
    case ReduceOp::kMax:
      return combine(into, from, count, [](W a, W b) { return a > b || a != a ? a : b; });
    case ReduceOp::kProduct:
      return combine(into, from, count, [](W a, W b) { return static_cast<W>(a * b); });
    case ReduceOp::kAdasum:
      break;
  }
  throw internal_error("Adasum does not reduce element by element");
}

QSGD_CLONES
void add_32(float* into, const float* from, size_t count) {
  for (size_t i = 0; i < count; ++i) into[i] = from[i] + into[i];
}

template <class T>
bool finite_value(T x) {
  if constexpr (std::is_integral_v<T>) {
    return true;
  } else {
    return std::isfinite(x);
  }
}

template <class T>
bool scale_typed(T* to, const T* from, size_t count, double factor, int divisor) {
  using W = Wide<T>;
  bool finite = true;
  if constexpr (std::is_integral_v<T>) {
    for (size_t i = 0; i < count; ++i) {
      const T value = static_cast<T>(from[i] / static_cast<int64_t>(divisor));
      to[i] = factor == 1 ? value : static_cast<T>(static_cast<double>(value) * factor);
    }
  } else {
    const W by = static_cast<W>(factor / divisor);
    for (size_t i = 0; i < count; ++i) {
      const W value = static_cast<W>(from[i]);
      const T scaled = by == 1 ? from[i] : static_cast<T>(value * by);
      to[i] = scaled;
      finite &= finite_value(static_cast<W>(scaled));
    }
  }
  return finite;
}

QSGD_CLONES
bool scale_32(float* to, const float* from, size_t count, float by) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const float value = from[i] * by;
    const uint32_t magnitude = magnitude_bits(value);
    most = magnitude > most ? magnitude : most;
    to[i] = value;
  }
  return most < kInfinity;
}

// Uses the bits: a number is finite unless its exponent is all ones.
template <class Bits>
QSGD_INLINE bool finite_bits(const Bits* x, size_t count, Bits magnitude, Bits infinity) {
  Bits most = 0;
  for (size_t i = 0; i < count; ++i) {
    const Bits bits = x[i] & magnitude;
    most = bits > most ? bits : most;
  }
  return most < infinity;
}

QSGD_CLONES
bool finite_16(const uint16_t* x, size_t count, uint16_t infinity) {
  return finite_bits<uint16_t>(x, count, 0x7fff, infinity);
}
QSGD_CLONES
bool finite_64(const uint64_t* x, size_t count) {
  return finite_bits<uint64_t>(x, count, 0x7fffffffffffffff, 0x7ff0000000000000);
}

QSGD_CLONES
bool add_scaled_32(float* to, const float* a, const float* b, size_t count, float by) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const float value = (b[i] + a[i]) * by;
    const uint32_t magnitude = magnitude_bits(value);
    most = magnitude > most ? magnitude : most;
    to[i] = value;
  }
  return most < kInfinity;
}

}  // namespace

const char* describe(ReduceOp op) {
  static constexpr const char* kNames[kReduceOps] = {"sum", "average", "min",
                                                     "max", "product", "adasum"};
  return kNames[static_cast<size_t>(op)];
}

void reduce_into(void* into, const void* from, size_t count, DType dtype, ReduceOp op) {
  const bool sum = op == ReduceOp::kSum || op == ReduceOp::kAverage;
  if (dtype == DType::kFloat32 && sum) {
    return add_32(static_cast<float*>(into), static_cast<const float*>(from), count);
  }
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    reduce_typed(static_cast<T*>(into), static_cast<const T*>(from), count, op);
  });
}

bool scale_copy(void* to, const void* from, size_t count, DType dtype, double factor, int divisor) {
  if (dtype == DType::kFloat32) {
    return scale_32(static_cast<float*>(to), static_cast<const float*>(from), count,
                    static_cast<float>(factor / divisor));
  }
  return dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    return scale_typed(static_cast<T*>(to), static_cast<const T*>(from), count, factor, divisor);
  });
}

bool add_scaled(float* to, const float* a, const float* b, size_t count, float by) {
  return add_scaled_32(to, a, b, count, by);
}

bool all_finite(const void* x, size_t count, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return finite_16(static_cast<const uint16_t*>(x), count, 0x7c00);
    case DType::kBFloat16:
      return finite_16(static_cast<const uint16_t*>(x), count, 0x7f80);
    case DType::kFloat32:
      return all_finite(static_cast<const float*>(x), count);
    case DType::kFloat64:
      return finite_64(static_cast<const uint64_t*>(x), count);
    default:
      return true;
  }
}

}  // namespace qsgd
