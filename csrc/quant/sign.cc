// One bit: an element's sign times the mean magnitude of its bucket, which is the scale with
// minimum error. Karimireddy et al., Error feedback fixes signSGD, ICML 2019, section 4.
#include <cmath>
#include <limits>

#include "quant/code.h"
#include "quant/grid.h"

namespace qsgd {
namespace {

QSGD_CLONES
bool encode_signs(const float* x, size_t count, float* scales, uint8_t* code) {
  for (size_t i = 0; i < count; ++i) {
    code[i] = static_cast<uint8_t>(1u - (bit_cast<uint32_t>(x[i]) >> 31));
  }
  const double mean = lane_sum(count, Magnitudes{x}) / static_cast<double>(count);
  const bool finite = std::isfinite(mean);  // a sum of float32 cannot overflow float64
  scales[0] = finite ? static_cast<float>(mean) : std::numeric_limits<float>::quiet_NaN();
  return finite;
}

QSGD_CLONES
void decode_signs(const float* scales, const uint8_t* code, size_t count, float* out) {
  const float mean = scales[0];
  for (size_t i = 0; i < count; ++i) out[i] = code[i] != 0 ? mean : -mean;
}

class Sign final : public IntegerCode {
 public:
  constexpr Sign() : IntegerCode({"sign", 1, 1, 1, kBiased, 1}) {}

 private:
  bool encode_integers(const float* x, size_t count, const CodecSpec& /*spec*/,
                       const uint16_t* /*noise*/, float* scales, uint8_t* integers) const override {
    return encode_signs(x, count, scales, integers);
  }
  void decode_integers(const float* scales, const uint8_t* integers, size_t count,
                       const CodecSpec& /*spec*/, float* out) const override {
    decode_signs(scales, integers, count, out);
  }
};

}  // namespace

const Code& sign_code() {
  static constexpr Sign code;
  return code;
}

}  // namespace qsgd
