// TernGrad: every element becomes -1, 0 or 1 times the bucket's largest magnitude after clipping at
// 2.5 standard deviations. Wen et al., TernGrad, NeurIPS 2017, sections 3 and 4.
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/code.h"
#include "quant/grid.h"

namespace qsgd {
namespace {

constexpr double kClip = 2.5;

struct TernaryGrid : SignedLevels {
  using Real = float;
  float top;

  QSGD_INLINE Place<float> place(float x) const {
    const float ratio = std::fabs(x) / top;
    return {ratio < 1 ? 0 : 1, ratio < 1 ? ratio : 0.0f, top};
  }
};

QSGD_CLONES
bool encode_ternary(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                    float* scales, uint8_t* code) {
  const float largest = largest_magnitude(x, count);
  if (!(largest > 0 && largest <= kLargestFloat)) {
    std::memset(code, 1, count);
    scales[0] = largest == 0 ? 0 : std::numeric_limits<float>::quiet_NaN();
    return largest == 0;
  }
  // Relative to zero, not to the mean: a bucket of equal elements must not be clipped to zero.
  const double sigma = std::sqrt(lane_sum(count, Squares{x}) / static_cast<double>(count));
  const double clip = kClip * sigma;
  const TernaryGrid grid{{1}, clip < double{largest} ? static_cast<float>(clip) : largest};
  round_to(grid, x, count, spec, noise, code);
  scales[0] = static_cast<float>(double{grid.top} * contraction(grid, x, count, spec));
  return true;
}

QSGD_CLONES
void decode_ternary(const float* scales, const uint8_t* code, size_t count, float* out) {
  const float top = scales[0];
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(int{code[i]} - 1) * top;
}

class TernGrad final : public IntegerCode {
 public:
  constexpr TernGrad() : IntegerCode({"terngrad", 2, 2, 1, kRounds | kBiased, 2}) {}

 private:
  bool encode_integers(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                       float* scales, uint8_t* integers) const override {
    return encode_ternary(x, count, spec, noise, scales, integers);
  }
  void decode_integers(const float* scales, const uint8_t* integers, size_t count,
                       const CodecSpec& /*spec*/, float* out) const override {
    decode_ternary(scales, integers, count, out);
  }
};

}  // namespace

const Code& terngrad_code() {
  static constexpr TernGrad code;
  return code;
}

}  // namespace qsgd
