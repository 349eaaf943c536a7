#include "collectives/adasum_math.h"

#include <algorithm>

#include "quant/convert.h"

namespace qsgd {
namespace {

constexpr int kLanes = 8;  // a fixed number, so that every instruction set gives the same sums
constexpr size_t kPairs = 1024;

template <class T>
QSGD_INLINE Dots dots_loop(const T* a, const T* b, size_t count) {
  double ab[kLanes] = {}, aa[kLanes] = {}, bb[kLanes] = {};
  const auto add = [&](size_t i, int lane) {
    const double x = a[i], y = b[i];
    ab[lane] += x * y;
    aa[lane] += x * x;
    bb[lane] += y * y;
  };
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (; i < count; ++i) add(i, 0);
  Dots dots{};
  for (int lane = 0; lane < kLanes; ++lane) dots += {ab[lane], aa[lane], bb[lane]};
  return dots;
}

QSGD_CLONES
Dots dots_32(const float* a, const float* b, size_t count) { return dots_loop(a, b, count); }
QSGD_CLONES
Dots dots_64(const double* a, const double* b, size_t count) { return dots_loop(a, b, count); }

template <class T>
QSGD_INLINE void combine_loop(T* own, T by_own, const T* other, T by_other, size_t count) {
  for (size_t i = 0; i < count; ++i) own[i] = by_own * own[i] + by_other * other[i];
}

QSGD_CLONES
void combine_32(float* own, float by_own, const float* other, float by_other, size_t count) {
  combine_loop(own, by_own, other, by_other, count);
}
QSGD_CLONES
void combine_64(double* own, double by_own, const double* other, double by_other, size_t count) {
  combine_loop(own, by_own, other, by_other, count);
}

// Calls f(offset in bytes, count, float32 buffer for a, the same for b) for each block.
template <class F>
void for_blocks(DType dtype, size_t count, F&& f) {
  float a[kPairs], b[kPairs];
  for (size_t at = 0; at < count; at += kPairs) {
    f(at * facts(dtype).size, std::min(kPairs, count - at), a, b);
  }
}

}  // namespace

Factors adasum_factors(const Dots& dots) {
  return {dots.aa == 0 ? 1 : 1 - dots.ab / (2 * dots.aa),
          dots.bb == 0 ? 1 : 1 - dots.ab / (2 * dots.bb)};
}

Dots dots_of(const void* a, const void* b, DType dtype, size_t count) {
  if (dtype == DType::kFloat64) {
    return dots_64(static_cast<const double*>(a), static_cast<const double*>(b), count);
  }
  if (dtype == DType::kFloat32) {
    return dots_32(static_cast<const float*>(a), static_cast<const float*>(b), count);
  }
  Dots dots{};
  for_blocks(dtype, count, [&](size_t at, size_t n, float* wide_a, float* wide_b) {
    float32_from(static_cast<const char*>(a) + at, dtype, n, wide_a);
    float32_from(static_cast<const char*>(b) + at, dtype, n, wide_b);
    dots += dots_32(wide_a, wide_b, n);
  });
  return dots;
}

void combine(void* own, double by_own, const void* other, double by_other, DType dtype,
             size_t count) {
  if (dtype == DType::kFloat64) {
    return combine_64(static_cast<double*>(own), by_own, static_cast<const double*>(other),
                      by_other, count);
  }
  const auto x = static_cast<float>(by_own), y = static_cast<float>(by_other);
  if (dtype == DType::kFloat32) {
    return combine_32(static_cast<float*>(own), x, static_cast<const float*>(other), y, count);
  }
  for_blocks(dtype, count, [&](size_t at, size_t n, float* wide_own, float* wide_other) {
    float32_from(static_cast<const char*>(own) + at, dtype, n, wide_own);
    float32_from(static_cast<const char*>(other) + at, dtype, n, wide_other);
    combine_32(wide_own, x, wide_other, y, n);
    float32_to(wide_own, n, dtype, static_cast<char*>(own) + at);
  });
}

}  // namespace qsgd
