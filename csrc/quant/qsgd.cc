// s uniform levels of a bucket's norm on each side of zero. Alistarh et al., QSGD, NeurIPS 2017,
// section 3.1.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "quant/code.h"
#include "quant/convert.h"
#include "quant/grid.h"
#include "quant/kernels.h"

namespace qsgd {
namespace {

constexpr float kMostFloat16 = 65504;
constexpr float kSmall = std::numeric_limits<float>::min() * 256;  // a level of it is normal
constexpr float kLift = 0x1p64f;  // makes the inverse of the smallest norms finite

// NaN if an element is NaN or Inf. Never less than any element, so no level exceeds s.
float norm_of(const Kernels& k, const float* x, size_t count, Norm norm, uint32_t most) {
  if (norm == Norm::kMax) {
    return most < kInfinity ? bit_cast<float>(most) : std::numeric_limits<float>::quiet_NaN();
  }
  return norm_of_squares(k.sum_squares(x, count));
}

float norm_of(const Kernels& k, const float* x, size_t count, Norm norm) {
  return norm_of(k, x, count, norm, norm == Norm::kMax ? k.max_magnitude(x, count) : 0);
}

// Conversion of a bucket's elements to fixed-point numbers with 16 fractional bits.
struct Grid {
  Grid(float norm, int levels) {
    scale = whole_scale(levels) / norm;
    if (!is_plain(scale)) {
      lift = kLift;
      scale = whole_scale(levels) / (norm * kLift);
    }
  }
  float lift = 1;  // factor of the elements beforehand
  float scale;
};

// The bytes that a GPU writes, with its generator: for comparisons, so not vectorised by hand.
QSGD_CLONES
void quantize_by_philox(const float* x, size_t count, float lift, float scale,
                        const CodecSpec& spec, const NoiseKey& key, uint64_t tile, uint8_t* codes) {
  const auto levels = static_cast<unsigned>(spec.levels());
  for (size_t at = 0; at < count; at += kTile, ++tile, codes += spec.code_bytes(kTile)) {
    float staged[kTile] = {};
    uint16_t draw[kTile];
    uint8_t code[kTile];
    std::memcpy(staged, x + at, std::min<size_t>(kTile, count - at) * sizeof(float));
    noise(key, tile, 1, draw);
    for (int i = 0; i < kTile; ++i) {
      const auto number = static_cast<int32_t>(std::lrint(staged[i] * lift * scale));
      code[i] = static_cast<uint8_t>(static_cast<unsigned>((number + draw[i]) >> 16) + levels);
    }
    kernels().pack[spec.bits](code, 1, codes);
  }
}

void quantize(const Kernels& k, const float* x, size_t count, const Grid& grid,
              const CodecSpec& spec, const NoiseKey& key, uint64_t tile, uint8_t* codes) {
  if (key.generator == Generator::kPhilox && spec.rounding == Rounding::kStochastic) {
    return quantize_by_philox(x, count, grid.lift, grid.scale, spec, key, tile, codes);
  }
  const size_t direct = grid.lift == 1 ? count / kTile : 0;
  const auto rounding = static_cast<size_t>(spec.rounding);
  k.quantize[rounding][spec.bits](x, direct, grid.scale, key, tile, codes);
  // Tiles that need lifting, or the last, incomplete one.
  for (size_t t = direct; t < tiles_of(count); ++t) {
    float staged[kTile] = {};
    const size_t rest = std::min<size_t>(kTile, count - t * kTile);
    for (size_t i = 0; i < rest; ++i) staged[i] = x[t * kTile + i] * grid.lift;
    k.quantize[rounding][spec.bits](staged, 1, grid.scale, key, tile + t,
                                    codes + spec.code_bytes(t * kTile));
  }
}

void write_zeros(size_t count, const CodecSpec& spec, uint8_t* codes) {
  uint8_t code[kTile], packed[kTile];
  std::memset(code, spec.levels(), sizeof code);
  kernels().pack[spec.bits](code, 1, packed);
  const size_t tile_bytes = spec.code_bytes(kTile);
  for (size_t t = 0; t < tiles_of(count); ++t, codes += tile_bytes) {
    std::memcpy(codes, packed, tile_bytes);
  }
}

// Sum of f (2^16 - f), where f are the fractional bits of the fixed-point numbers. A sum of
// integers, and so the same in any order.
uint64_t variance(const Kernels& k, const float* x, size_t count, const Grid& grid) {
  const size_t direct = grid.lift == 1 ? count / kTile : 0;
  uint64_t sum = k.variance(x, direct, grid.scale);
  for (size_t i = direct * kTile; i < count; ++i) {
    const auto number = static_cast<int32_t>(std::lrint(x[i] * grid.lift * grid.scale));
    const uint64_t f = static_cast<uint32_t>(number) & 0xffffu;
    sum += f * (0x10000u - f);
  }
  return sum;
}

// Returns 1 / (1 + w) if w, the variance over |x|^2, reaches 1, which makes the code a contraction.
//
// With x in units of a level, the variance of an element is f (1 - f), and exceeds |x|^2 by at most
// |x| - 2 |x|^2 <= 1/8. If the largest is s, n <= 8 s^2 elements cannot compensate for its s^2. And
// the sum of |x| is at most sqrt(n) |x|: if |x|^2 > n/4, w < 1.
float shrink(const Kernels& k, const float* x, size_t count, const Grid& grid,
             const CodecSpec& spec, float norm) {
  const auto s = static_cast<size_t>(spec.levels());
  if (spec.norm == Norm::kMax && count <= 8 * s * s) return 1;
  const double unit = double{norm} / spec.levels();
  // A little above 1/4, because f is rounded to 16 bits. A part of the elements usually suffices.
  const double enough = 0.26 * unit * unit * static_cast<double>(count);
  if (k.sum_squares(x, count / 8) > enough) return 1;
  const double energy = k.sum_squares(x, count);
  if (energy > enough) return 1;
  const auto sum = static_cast<double>(variance(k, x, count, grid));
  const double w = unit * unit * (sum * 0x1p-32) / energy;
  return w >= 1 ? static_cast<float>(1 / (1 + w)) : 1.0f;
}

// The norm sent to decoders.
float scale_of(const Kernels& k, const float* x, size_t count, const Grid& grid,
               const CodecSpec& spec, float norm) {
  const bool contracts = spec.contract && spec.rounding == Rounding::kStochastic;
  return contracts ? norm * shrink(k, x, count, grid, spec, norm) : norm;
}

// Returns the scale; NaN if the bucket contains non-finite elements.
float encode_bucket(const Kernels& k, const float* x, size_t count, uint64_t first,
                    const CodecSpec& spec, const NoiseKey& key, uint8_t* codes) {
  const float norm = norm_of(k, x, count, spec.norm);
  if (!(norm > 0)) {
    write_zeros(count, spec, codes);
    return norm;
  }
  const Grid grid(norm, spec.levels());
  quantize(k, x, count, grid, spec, key, first / kTile, codes);
  return scale_of(k, x, count, grid, spec, norm);
}

// Where float32 is imprecise or overflows, unit times level could overflow or be far from the norm.
bool is_extreme(float norm) { return (norm < kSmall && norm != 0) || norm > kLargestFloat / 2; }

void values_of_extreme(const uint8_t* codes, float norm, const CodecSpec& spec, float* value) {
  const int levels = spec.levels();
  uint8_t code[kTile];
  kernels().unpack[spec.bits](codes, 1, code);
  for (int i = 0; i < kTile; ++i) {
    value[i] = static_cast<float>(double(int{code[i]} - levels) * double{norm} / levels);
  }
}

float unit_of(float norm, const CodecSpec& spec) {
  return norm / static_cast<float>(spec.levels());
}

// Writes or adds the values of a bucket.
template <bool Add>
void decode_bucket(const Kernels& k, float norm, const uint8_t* codes, size_t count,
                   const CodecSpec& spec, float* out) {
  const float unit = unit_of(norm, spec);
  const bool extreme = is_extreme(norm);
  const size_t direct = extreme ? 0 : count / kTile;
  (Add ? k.dequantize_add : k.dequantize[0])[spec.bits](codes, direct, unit, out);
  for (size_t t = direct; t < tiles_of(count); ++t) {
    float value[kTile];
    const uint8_t* const from = codes + spec.code_bytes(t * kTile);
    if (extreme) {
      values_of_extreme(from, norm, spec, value);
    } else {
      k.dequantize[0][spec.bits](from, 1, unit, value);
    }
    float* const to = out + t * kTile;
    const size_t rest = std::min<size_t>(kTile, count - t * kTile);
    for (size_t i = 0; i < rest; ++i) to[i] = Add ? to[i] + value[i] : value[i];
  }
}

// Buffer for elements converted to float32, a bucket or a piece at a time.
class Staging {
 public:
  explicit Staging(size_t most) : many_(most > std::size(few_) ? most : 0) {}
  float* data() { return many_.empty() ? few_ : many_.data(); }

 private:
  alignas(64) float few_[2048];
  std::vector<float> many_;
};

// Whether the kernels draw the noise, if any.
bool kernels_draw(const CodecSpec& spec, const NoiseKey& key) {
  return key.generator == Generator::kArs || spec.rounding == Rounding::kNearest;
}

// Codes the longest sequence of buckets, from x on, that the kernels support directly.
size_t encode_plain_buckets(const Kernels& k, const uint8_t* x, DType dtype, size_t buckets,
                            uint64_t first, const CodecSpec& spec, const NoiseKey& key,
                            float* scales, uint8_t* codes) {
  const int type = kernel_type(dtype);
  if (spec.norm != Norm::kMax || spec.contract || !kernels_draw(spec, key) || type < 0) return 0;
  return k.quantize_buckets[type][static_cast<size_t>(spec.rounding)][spec.bits](
      x, buckets, spec.bucket / kTile, key, first / kTile, scales, codes);
}

// Codes a bucket whose largest magnitude is known, and writes the coding error. Returns the scale.
float encode_bucket_keeping(const Kernels& k, const float* x, size_t count, uint32_t most,
                            uint64_t first, const CodecSpec& spec, const NoiseKey& key,
                            uint8_t* codes, float* left, const float* source) {
  const float norm = norm_of(k, x, count, spec.norm, most);
  if (!(norm > 0)) {
    write_zeros(count, spec, codes);
    std::fill_n(left, count, 0.0f);
    return norm;
  }
  const Grid grid(norm, spec.levels());
  const float scale = scale_of(k, x, count, grid, spec, norm);
  const bool plain = grid.lift == 1 && !is_extreme(scale) && kernels_draw(spec, key);
  const size_t tiles = plain ? count / kTile : 0;
  const size_t done = tiles * kTile;
  const auto rounding = static_cast<size_t>(spec.rounding);
  k.quantize_keeping[rounding][spec.bits](x, tiles, grid.scale, unit_of(scale, spec), key,
                                          first / kTile, codes, left, source);
  codes += spec.code_bytes(done);
  quantize(k, x + done, count - done, grid, spec, key, first / kTile + tiles, codes);
  decode_bucket<false>(k, scale, codes, count - done, spec, left + done);
  keep_rest(x + done, count - done, left + done);
  return scale;
}

template <bool Add>
bool decode_floats(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                   float* out) {
  const Kernels& k = kernels();
  bool finite = true;
  for (size_t at = 0; at < count; at += spec.bucket) {
    const size_t size = std::min<size_t>(spec.bucket, count - at);
    finite &= std::isfinite(*scales);
    decode_bucket<Add>(k, *scales++, codes, size, spec, out + at);
    codes += spec.code_bytes(size);
  }
  return finite;
}

// The same for other types: directly from the codes if no value can overflow.
bool decode_others(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                   DType dtype, uint8_t* out) {
  const Kernels& k = kernels();
  const int type = kernel_type(dtype);
  const float most = dtype == DType::kFloat16 ? kMostFloat16 : kLargestFloat / 2;
  Staging staging(std::min<size_t>(count, spec.bucket));
  bool finite = true;
  for (size_t at = 0; at < count; at += spec.bucket) {
    const size_t size = std::min<size_t>(spec.bucket, count - at);
    const float norm = *scales++;
    uint8_t* const to = out + at * facts(dtype).size;
    if (type >= 0 && size % kTile == 0 && std::abs(norm) <= most && !is_extreme(norm)) {
      k.dequantize[type][spec.bits](codes, size / kTile, unit_of(norm, spec), to);
    } else {
      decode_bucket<false>(k, norm, codes, size, spec, staging.data());
      finite &= float32_to(staging.data(), size, dtype, to);
    }
    codes += spec.code_bytes(size);
  }
  return finite;
}

class Qsgd final : public Code {
 public:
  constexpr Qsgd() : Code({"qsgd", 2, 8, 1, kNormed | kRounds}) {}

  bool encode(const void* x, DType dtype, size_t count, uint64_t first, const CodecSpec& spec,
              const NoiseKey& key, float* scales, uint8_t* codes) const override {
    const auto* const in = static_cast<const uint8_t*>(x);
    const Kernels& k = kernels();
    const size_t element = facts(dtype).size;
    Staging staging(dtype == DType::kFloat32 ? 0 : std::min<size_t>(count, spec.bucket));
    bool finite = true;
    for (size_t at = 0; at < count;) {
      const size_t plain =
          encode_plain_buckets(k, in + at * element, dtype, (count - at) / spec.bucket, first + at,
                               spec, key, scales, codes);
      scales += plain;
      codes += spec.code_bytes(plain * spec.bucket);
      at += plain * spec.bucket;
      const size_t size = std::min<size_t>(spec.bucket, count - at);
      if (size == 0) break;
      const auto* floats = reinterpret_cast<const float*>(in + at * element);
      if (dtype != DType::kFloat32) {
        float32_from(in + at * element, dtype, size, staging.data());
        floats = staging.data();
      }
      const float scale = encode_bucket(k, floats, size, first + at, spec, key, codes);
      finite &= !std::isnan(scale);
      *scales++ = scale;
      codes += spec.code_bytes(size);
      at += size;
    }
    return finite;
  }

  bool encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                      const CodecSpec& spec, const NoiseKey& key, float* scales, uint8_t* codes,
                      float* left) const override {
    const auto* const in = static_cast<const uint8_t*>(x);
    const Kernels& k = kernels();
    Staging staging(std::min<size_t>(count, spec.bucket));
    float* const value = staging.data();
    bool finite = true;
    for (size_t at = 0; at < count; at += spec.bucket) {
      const size_t size = std::min<size_t>(spec.bucket, count - at);
      const uint32_t most =
          scale_add(in + at * facts(dtype).size, dtype, size, by, left + at, value, false);
      finite &= most < kInfinity;
      const float* const source =
          dtype == DType::kFloat32 ? static_cast<const float*>(x) + at : left + at;
      *scales++ = encode_bucket_keeping(k, value, size, most, first + at, spec, key, codes,
                                        left + at, source);
      codes += spec.code_bytes(size);
    }
    return finite;
  }

  bool decode(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
              void* out, DType dtype) const override {
    if (dtype == DType::kFloat32) {
      return decode_floats<false>(scales, codes, count, spec, static_cast<float*>(out));
    }
    return decode_others(scales, codes, count, spec, dtype, static_cast<uint8_t*>(out));
  }

  void decode_add(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                  float* sum) const override {
    decode_floats<true>(scales, codes, count, spec, sum);
  }
};

}  // namespace

const Code& qsgd_code() {
  static constexpr Qsgd code;
  return code;
}

}  // namespace qsgd
