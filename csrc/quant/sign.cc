#include "quant/sign.h"

#include <cmath>
#include <limits>

#include "quant/grid.h"

namespace qsgd {

QSGD_CLONES
bool sign_encode(const float* x, size_t count, float* scales, uint8_t* code) {
  for (size_t i = 0; i < count; ++i) {
    code[i] = static_cast<uint8_t>(1u - (bit_cast<uint32_t>(x[i]) >> 31));
  }
  const double mean = lane_sum(count, Magnitudes{x}) / static_cast<double>(count);
  const bool finite = std::isfinite(mean);  // a sum of float32 cannot overflow float64
  scales[0] = finite ? static_cast<float>(mean) : std::numeric_limits<float>::quiet_NaN();
  return finite;
}

QSGD_CLONES
void sign_decode(const float* scales, const uint8_t* code, size_t count, float* out) {
  const float mean = scales[0];
  for (size_t i = 0; i < count; ++i) out[i] = code[i] != 0 ? mean : -mean;
}

}  // namespace qsgd
