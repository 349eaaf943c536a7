// 2^bits levels from a bucket's smallest to its largest element, with the layout of QSGD-TF: a
// bucket has two scales, its smallest element and the distance between levels.
#include <cmath>
#include <limits>

#include "quant/code.h"
#include "quant/grid.h"

namespace qsgd {
namespace {

// In float64, so that neither the range of a bucket nor the inverse of a tiny unit overflows.
struct AffineGrid {
  using Real = double;
  double least;
  double unit;
  double inverse;  // 0 for a constant bucket: all elements are on level 0
  double levels;

  QSGD_INLINE Place<double> place(float x) const {
    const double raw = (double{x} - least) * inverse;
    const double a = raw < levels ? raw : levels;
    const int level = static_cast<int>(a);
    return {level, a - level, unit};
  }
  QSGD_INLINE uint8_t code(float /*x*/, int level) const { return static_cast<uint8_t>(level); }
};

// Integers with the order of the floats, so that the loop can be vectorised.
QSGD_INLINE int32_t ordered(float x) {
  const auto bits = bit_cast<int32_t>(x);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

QSGD_INLINE float from_ordered(int32_t key) {
  return bit_cast<float>(key ^ ((key >> 31) & 0x7fffffff));
}

QSGD_INLINE AffineGrid grid_of(const float* x, size_t count, int bits) {
  int32_t low = ordered(x[0]), high = low;
  for (size_t i = 1; i < count; ++i) {
    const int32_t key = ordered(x[i]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  AffineGrid grid;
  grid.least = double{from_ordered(low)};
  grid.levels = (1 << bits) - 1;
  const double range = double{from_ordered(high)} - grid.least;
  double unit = range / grid.levels;
  // The unit is sent as float32, in which it must neither underflow nor become Inf. (A range beyond
  // float32 with a single bit is cut.)
  if (unit < double{std::numeric_limits<float>::min()}) unit = std::ceil(unit * 0x1p149) * 0x1p-149;
  grid.unit = double{static_cast<float>(unit < kLargestFloat ? unit : kLargestFloat)};
  grid.inverse = grid.unit > 0 ? 1 / grid.unit : 0;
  return grid;
}

QSGD_CLONES
bool encode_affine(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                   float* scales, uint8_t* code) {
  if (!(largest_magnitude(x, count) <= kLargestFloat)) {
    scales[0] = scales[1] = std::numeric_limits<float>::quiet_NaN();
    return false;
  }
  const AffineGrid grid = grid_of(x, count, spec.bits);
  round_to(grid, x, count, spec, noise, code);
  const double factor = contraction(grid, x, count, spec);
  scales[0] = static_cast<float>(grid.least * factor);
  scales[1] = static_cast<float>(grid.unit * factor);
  return true;
}

QSGD_CLONES
void decode_affine(const float* scales, const uint8_t* code, size_t count, float* out) {
  const double least = double{scales[0]}, unit = double{scales[1]};
  for (size_t i = 0; i < count; ++i) {
    const double value = least + unit * code[i];
    out[i] = static_cast<float>(value > kLargestFloat ? kLargestFloat : value);  // NaN is kept
  }
}

class MinMax final : public IntegerCode {
 public:
  constexpr MinMax() : IntegerCode({"minmax", 1, 8, 2, kRounds}) {}

 private:
  bool encode_integers(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                       float* scales, uint8_t* integers) const override {
    return encode_affine(x, count, spec, noise, scales, integers);
  }
  void decode_integers(const float* scales, const uint8_t* integers, size_t count,
                       const CodecSpec& /*spec*/, float* out) const override {
    decode_affine(scales, integers, count, out);
  }
};

}  // namespace

const Code& minmax_code() {
  static constexpr MinMax code;
  return code;
}

}  // namespace qsgd
