// Common part of the codes with levels: a grid of levels, stochastic rounding to adjacent levels,
// and sums whose order is the same for all instruction sets.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "common/dtype.h"
#include "quant/codec.h"

namespace qsgd {

// term(0) + term(1) + ... in eight interleaved sums: a fixed order that can be vectorised.
template <class Term>
QSGD_INLINE double lane_sum(size_t count, const Term& term) {
  constexpr size_t kSums = 8;
  double lane[kSums] = {};
  size_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (size_t l = 0; l < kSums; ++l) lane[l] += term(i + l);
  }
  for (size_t l = 0; i + l < count; ++l) lane[l] += term(i + l);
  double sum = 0;
  for (const double part : lane) sum += part;
  return sum;
}

struct Squares {
  const float* x;
  QSGD_INLINE double operator()(size_t i) const { return double{x[i]} * double{x[i]}; }
};

// The L2 norm of elements with this sum of squares: NaN if it is not finite. Finite elements can
// have a norm beyond float32, which must not become the mark for "not finite".
QSGD_INLINE float norm_of_squares(double sum) {
  const double norm = std::sqrt(sum);
  if (!std::isfinite(norm)) return std::numeric_limits<float>::quiet_NaN();
  return static_cast<float>(norm < double{kLargestFloat} ? norm : double{kLargestFloat});
}

QSGD_INLINE float l2_norm(const float* x, size_t count) {
  return norm_of_squares(lane_sum(count, Squares{x}));
}

struct Magnitudes {
  const float* x;
  QSGD_INLINE double operator()(size_t i) const { return x[i] < 0 ? -double{x[i]} : double{x[i]}; }
};

// The largest magnitude; Inf or NaN if an element is. Compared as integers, which have the order of
// the floats, with Inf and NaN above all others.
QSGD_INLINE float largest_magnitude(const float* x, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t m = magnitude_bits(x[i]);
    most = m > most ? m : most;
  }
  return bit_cast<float>(most);
}

// Position of an element: `fraction` of the distance `gap` from a level to the next one.
template <class Real>
struct Place {
  int level;
  Real fraction;  // 0 <= fraction < 1, in levels
  Real gap;
};

// Part of a grid with `levels` levels on each side of zero: the code of a level with an element's
// sign.
struct SignedLevels {
  int levels;
  QSGD_INLINE uint8_t code(float x, int level) const {
    return static_cast<uint8_t>(levels + (bit_cast<uint32_t>(x) >> 31 ? -level : level));
  }
};

// A Grid has: Real; Place<Real> place(float); uint8_t code(float, int level), with the element's
// sign.
//
// The element is rounded up if fraction >= u. u is uniform over the centres of 2^16 equal parts of
// (0, 1), so an element on a level stays there, and the last level, whose fraction is 0, is never
// exceeded.
template <class Grid>
QSGD_INLINE void round_to(const Grid& grid, const float* x, size_t count, const CodecSpec& spec,
                          const uint16_t* noise, uint8_t* code) {
  using Real = typename Grid::Real;
  const Real half = static_cast<Real>(0.5);
  if (spec.rounding == Rounding::kNearest) {
    for (size_t i = 0; i < count; ++i) {
      const Place<Real> p = grid.place(x[i]);
      code[i] = grid.code(x[i], p.level + (p.fraction >= half ? 1 : 0));
    }
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const Real u = (static_cast<Real>(noise[i]) + half) * static_cast<Real>(0x1p-16);
    const Place<Real> p = grid.place(x[i]);
    code[i] = grid.code(x[i], p.level + (p.fraction >= u ? 1 : 0));
  }
}

template <class Grid>
struct RoundingVariance {
  const Grid& grid;
  const float* x;
  QSGD_INLINE double operator()(size_t i) const {
    const auto p = grid.place(x[i]);
    const double f = double{p.fraction}, gap = double{p.gap};
    return gap * gap * f * (1 - f);
  }
};

// Factor of the scales: 1/(1 + w) if the spec requires a contraction and the normalised variance w
// of this bucket reaches 1. Nearest rounding has no variance.
template <class Grid>
QSGD_INLINE double contraction(const Grid& grid, const float* x, size_t count,
                               const CodecSpec& spec) {
  if (!spec.contract || spec.rounding == Rounding::kNearest) return 1;
  const double energy = lane_sum(count, Squares{x});
  const double w = lane_sum(count, RoundingVariance<Grid>{grid, x}) / energy;
  return w >= 1 ? 1 / (1 + w) : 1;  // for a bucket of zeros w is NaN
}

}  // namespace qsgd
