#include "quant/quantizer.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "common/dtype.h"
#include "common/error.h"

namespace qsgd {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr float kSmall = std::numeric_limits<float>::min() * 256;  // a level of it is normal

// The largest magnitude as an integer: ordered like the floats, with Inf and NaN above all others,
// so that one pass finds both the norm and any element that is not finite.
QSGD_INLINE uint32_t max_magnitude(const float* x, size_t count) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t m = bit_cast<uint32_t>(x[i]) & kMagnitude;
    most = m > most ? m : most;
  }
  return most;
}

QSGD_INLINE float norm_of(const float* x, size_t count, Norm norm) {
  const uint32_t most = max_magnitude(x, count);
  if (most >= kInfinity) return std::numeric_limits<float>::quiet_NaN();
  if (norm == Norm::kMax) return bit_cast<float>(most);
  double sum = 0;  // in order: the same norm on every instruction set
  for (size_t i = 0; i < count; ++i) sum += double{x[i]} * double{x[i]};
  const double l2 = std::sqrt(sum);
  // Finite elements can have a norm beyond float32; it must not read as "not finite".
  return l2 > double{std::numeric_limits<float>::max()} ? std::numeric_limits<float>::max()
                                                        : static_cast<float>(l2);
}

// level = floor(s |x| / norm + u), u uniform in (0, 1): rounds up with probability frac(s
// |x|/norm). u has 17 bits and s |x| / norm at most 7 before the point, so the sum is exact in
// float32 and a bucket's maximum stays at s; the clamp covers the rounding of the quotient itself.
QSGD_INLINE void quantize_tile(const float* x, float inverse, int levels, const uint16_t* noise,
                               uint8_t* code) {
  for (int i = 0; i < kTile; ++i) {
    const float u = (static_cast<float>(noise[i]) + 0.5f) * 0x1p-16f;
    int level = static_cast<int>(std::fabs(x[i]) * inverse + u);
    level = level > levels ? levels : level;
    code[i] = static_cast<uint8_t>(levels + (bit_cast<uint32_t>(x[i]) >> 31 ? -level : level));
  }
}

// For norms so small that s / norm overflows float32.
void quantize_tile_tiny(const float* x, float norm, int levels, const uint16_t* noise,
                        uint8_t* code) {
  for (int i = 0; i < kTile; ++i) {
    const double u = (double{1} * noise[i] + 0.5) * 0x1p-16;
    int level = static_cast<int>(std::fabs(double{x[i]}) / double{norm} * levels + u);
    level = level > levels ? levels : level;
    code[i] = static_cast<uint8_t>(levels + (std::signbit(x[i]) ? -level : level));
  }
}

// A tile's codes interleave at a fixed stride, so that packing is whole-register shifts and ors.
QSGD_INLINE void pack_tile(const uint8_t* code, int bits, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, code, kTile);
  } else if (bits == 4) {
    for (int i = 0; i < 32; ++i) out[i] = static_cast<uint8_t>(code[i] | (code[i + 32] << 4));
  } else {
    for (int i = 0; i < 16; ++i) {
      out[i] = static_cast<uint8_t>(code[i] | (code[i + 16] << 2) | (code[i + 32] << 4) |
                                    (code[i + 48] << 6));
    }
  }
}

QSGD_INLINE void unpack_tile(const uint8_t* in, int bits, uint8_t* code) {
  if (bits == 8) {
    std::memcpy(code, in, kTile);
  } else if (bits == 4) {
    for (int i = 0; i < 32; ++i) {
      code[i] = in[i] & 15;
      code[i + 32] = in[i] >> 4;
    }
  } else {
    for (int i = 0; i < 16; ++i) {
      code[i] = in[i] & 3;
      code[i + 16] = (in[i] >> 2) & 3;
      code[i + 32] = (in[i] >> 4) & 3;
      code[i + 48] = in[i] >> 6;
    }
  }
}

template <bool Add>
QSGD_INLINE void decode(float norm, const uint8_t* codes, size_t count, const QuantSpec& spec,
                        float* out) {
  const int levels = spec.levels();
  const float unit = norm / static_cast<float>(levels);
  // Where float32 is coarse or ends, unit times level could overflow or be far from the norm.
  const bool extreme = norm < kSmall || norm > std::numeric_limits<float>::max() / 2;
  const size_t tile_bytes = spec.code_bytes(kTile);
  for (size_t begin = 0; begin < count; begin += kTile, codes += tile_bytes) {
    uint8_t code[kTile];
    unpack_tile(codes, spec.bits, code);
    float value[kTile];
    if (extreme) {
      for (int i = 0; i < kTile; ++i) {
        value[i] = static_cast<float>(double(int{code[i]} - levels) * double{norm} / levels);
      }
    } else {
      for (int i = 0; i < kTile; ++i) value[i] = static_cast<float>(int{code[i]} - levels) * unit;
    }
    float* to = out + begin;
    if (count - begin >= kTile) {
      for (int i = 0; i < kTile; ++i) to[i] = Add ? to[i] + value[i] : value[i];
    } else {
      for (size_t i = 0; i < count - begin; ++i) to[i] = Add ? to[i] + value[i] : value[i];
    }
  }
}

}  // namespace

void check(const QuantSpec& spec) {
  if (spec.bits != 2 && spec.bits != 4 && spec.bits != 8) {
    throw usage_error("bits=" + std::to_string(spec.bits) + ": choose 2, 4 or 8");
  }
  if (spec.bucket == 0 || spec.bucket % kTile != 0 || spec.bucket > kMaxBucket) {
    throw usage_error("bucket_size=" + std::to_string(spec.bucket) + ": choose a multiple of " +
                      std::to_string(kTile) + " up to " + std::to_string(kMaxBucket));
  }
}

QSGD_CLONES
float encode_bucket(const float* x, size_t count, uint64_t first, const QuantSpec& spec,
                    const NoiseKey& key, uint8_t* codes) {
  const float norm = norm_of(x, count, spec.norm);
  const int levels = spec.levels();
  const size_t tile_bytes = spec.code_bytes(kTile);
  const bool silent = !(norm > 0);  // zeros only, or not finite: every code is zero
  const float inverse = static_cast<float>(levels) / norm;
  const bool tiny = !silent && inverse > std::numeric_limits<float>::max();
  for (size_t begin = 0; begin < count; begin += kTile, codes += tile_bytes) {
    uint8_t code[kTile];
    if (silent) {
      std::memset(code, levels, sizeof code);
    } else {
      uint16_t noise[kTile];
      tile_noise(key, (first + begin) / kTile, noise);
      float padded[kTile];
      const float* in = x + begin;
      if (count - begin < kTile) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, in, (count - begin) * sizeof(float));
        in = padded;
      }
      if (tiny) {
        quantize_tile_tiny(in, norm, levels, noise, code);
      } else {
        quantize_tile(in, inverse, levels, noise, code);
      }
    }
    pack_tile(code, spec.bits, codes);
  }
  return norm;
}

QSGD_CLONES
void decode_bucket(float norm, const uint8_t* codes, size_t count, const QuantSpec& spec,
                   float* out) {
  decode<false>(norm, codes, count, spec, out);
}

QSGD_CLONES
void decode_add_bucket(float norm, const uint8_t* codes, size_t count, const QuantSpec& spec,
                       float* out) {
  decode<true>(norm, codes, count, spec, out);
}

QSGD_CLONES
bool all_finite(const float* x, size_t count) { return max_magnitude(x, count) < kInfinity; }

}  // namespace qsgd
