// Levels 0, 2^-(s-1) ... 1/2, 1 times a bucket's norm. Ramezani-Kebrya et al., NUQSGD, JMLR 2021.
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/code.h"
#include "quant/grid.h"

namespace qsgd {
namespace {

QSGD_INLINE float power_of_two(int exponent) {
  return bit_cast<float>(static_cast<uint32_t>(127 + exponent) << 23);
}

struct ExponentialGrid : SignedLevels {
  using Real = float;
  float norm;
  int lowest;   // exponent of level 1
  float steps;  // 2^-lowest

  // A ratio's exponent is its level, its significand the fraction of the distance to the next
  // level.
  QSGD_INLINE Place<float> place(float x) const {
    const float ratio = std::fabs(x) / norm;
    const float r = ratio < 1 ? ratio : 1.0f;  // rounding may give an element above an L2 norm
    const auto bits = bit_cast<uint32_t>(r);
    const int exponent = static_cast<int>(bits >> 23) - 127;
    const bool below = exponent < lowest;
    const float linear = r * steps;
    const float significand = bit_cast<float>((bits & 0x7fffffu) | 0x3f800000u) - 1.0f;
    return {below ? 0 : levels + exponent, below ? linear : significand,
            norm * power_of_two(below ? lowest : exponent)};
  }
};

QSGD_CLONES
bool encode_exponential(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                        float* scales, uint8_t* code) {
  const float largest = largest_magnitude(x, count);
  const int levels = spec.levels();
  if (!(largest > 0 && largest <= kLargestFloat)) {
    std::memset(code, levels, count);
    scales[0] = largest == 0 ? 0 : std::numeric_limits<float>::quiet_NaN();
    return largest == 0;
  }
  const float norm = spec.norm == Norm::kMax ? largest : l2_norm(x, count);
  const ExponentialGrid grid{{levels}, norm, 1 - levels, power_of_two(levels - 1)};
  round_to(grid, x, count, spec, noise, code);
  scales[0] = static_cast<float>(double{norm} * contraction(grid, x, count, spec));
  return true;
}

QSGD_CLONES
void decode_exponential(const float* scales, const uint8_t* code, size_t count,
                        const CodecSpec& spec, float* out) {
  const int levels = spec.levels();
  const float norm = scales[0];
  for (size_t i = 0; i < count; ++i) {
    const int level = int{code[i]} - levels;
    const int size = level < 0 ? -level : level;
    const float ratio = size == 0 ? 0.0f : power_of_two(size - levels);
    out[i] = norm * (level < 0 ? -ratio : ratio);
  }
}

class Nuqsgd final : public IntegerCode {
 public:
  constexpr Nuqsgd() : IntegerCode({"nuqsgd", 2, 8, 1, kNormed | kRounds}) {}

 private:
  bool encode_integers(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                       float* scales, uint8_t* integers) const override {
    return encode_exponential(x, count, spec, noise, scales, integers);
  }
  void decode_integers(const float* scales, const uint8_t* integers, size_t count,
                       const CodecSpec& spec, float* out) const override {
    decode_exponential(scales, integers, count, spec, out);
  }
};

}  // namespace

const Code& nuqsgd_code() {
  static constexpr Nuqsgd code;
  return code;
}

}  // namespace qsgd
