// Plus or minus the bucket's largest magnitude where an element has at least half of it, else zero.
#include <cmath>
#include <cstring>
#include <limits>

#include "quant/code.h"
#include "quant/grid.h"

namespace qsgd {
namespace {

class Coarse final : public IntegerCode {
 public:
  constexpr Coarse() : IntegerCode({"coarse", 2, 2, 1, kBiased, 2}) {}

 private:
  bool encode_integers(const float* x, size_t count, const CodecSpec& /*spec*/,
                       const uint16_t* /*noise*/, float* scales, uint8_t* integers) const override {
    const float top = largest_magnitude(x, count);
    if (!std::isfinite(top)) {
      std::memset(integers, 1, count);
      scales[0] = std::numeric_limits<float>::quiet_NaN();
      return false;
    }
    scales[0] = top;
    for (size_t i = 0; i < count; ++i) {
      const int level = std::fabs(x[i]) >= 0.5f * top ? 1 : 0;
      integers[i] = static_cast<uint8_t>(std::signbit(x[i]) ? 1 - level : 1 + level);
    }
    return true;
  }
  void decode_integers(const float* scales, const uint8_t* integers, size_t count,
                       const CodecSpec& /*spec*/, float* out) const override {
    for (size_t i = 0; i < count; ++i) {
      out[i] = static_cast<float>(int{integers[i]} - 1) * scales[0];
    }
  }
};

}  // namespace

const Code& coarse_code() {
  static constexpr Coarse code;
  return code;
}

}  // namespace qsgd
