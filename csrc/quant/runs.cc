#include "quant/runs.h"

#include <algorithm>
#include <vector>

#include "quant/casts.h"
#include "quant/pack.h"
#include "quant/schemes.h"
#include "quant/topk.h"

namespace qsgd {
namespace {

size_t tiles(size_t count) { return (count + kTile - 1) / kTile; }

QSGD_CLONES
void pack(const uint8_t* code, size_t tiles, int bits, uint8_t* out) {
  const size_t tile_bytes = static_cast<size_t>(kTile / 8 * bits);
  for (size_t t = 0; t < tiles; ++t) pack_tile(code + t * kTile, bits, out + t * tile_bytes);
}

QSGD_CLONES
void unpack(const uint8_t* in, size_t tiles, int bits, uint8_t* code) {
  const size_t tile_bytes = static_cast<size_t>(kTile / 8 * bits);
  for (size_t t = 0; t < tiles; ++t) unpack_tile(in + t * tile_bytes, bits, code + t * kTile);
}

// One bucket after another, with the memory that they share.
class Coder {
 public:
  Coder(const CodecSpec& spec, size_t count)
      : spec_(spec), code_(tiles(std::min<size_t>(count, spec.bucket)) * kTile) {}

  bool encode(const float* x, size_t count, uint64_t first, const NoiseKey& key, float* scales,
              uint8_t* codes) {
    if (spec_.scheme == Scheme::kTopK) return topk_encode(x, count, spec_, codes);
    if (is_cast()) return cast_encode(x, count, spec_, codes);
    if (draws(spec_)) {
      noise_.resize(code_.size());
      noise(key, first / kTile, tiles(count), noise_.data());
    }
    const bool finite = scheme_encode(x, count, spec_, noise_.data(), scales, code_.data());
    pack(code_.data(), tiles(count), spec_.bits, codes);
    return finite;
  }

  bool decode(const float* scales, const uint8_t* codes, size_t count, float* out) {
    if (spec_.scheme == Scheme::kTopK) return topk_decode(codes, count, spec_, out);
    if (is_cast()) return cast_decode(codes, count, spec_, out);
    unpack(codes, tiles(count), spec_.bits, code_.data());
    scheme_decode(scales, code_.data(), count, spec_, out);
    return all_finite(scales, spec_.scales(count));
  }

 private:
  bool is_cast() const {
    return spec_.scheme == Scheme::kFloat16 || spec_.scheme == Scheme::kBFloat16;
  }

  const CodecSpec& spec_;
  std::vector<uint8_t> code_;
  std::vector<uint16_t> noise_;
};

// Calls f(begin, size, scales, codes) for every bucket.
template <class Scales, class Codes, class F>
void each_bucket(size_t count, const CodecSpec& spec, Scales* scales, Codes* codes, const F& f) {
  for (size_t begin = 0; begin < count; begin += spec.bucket) {
    const size_t size = std::min<size_t>(spec.bucket, count - begin);
    f(begin, size, scales, codes);
    scales += spec.scales(size);
    codes += spec.code_bytes(size);
  }
}

QSGD_CLONES
void add(const float* values, size_t count, float* sum) {
  for (size_t i = 0; i < count; ++i) sum[i] += values[i];
}

}  // namespace

bool encode_run(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                const NoiseKey& key, float* scales, uint8_t* codes) {
  Coder coder(spec, count);
  bool finite = true;
  each_bucket(count, spec, scales, codes,
              [&](size_t begin, size_t size, float* scale, uint8_t* code) {
                finite &= coder.encode(x + begin, size, first + begin, key, scale, code);
              });
  return finite;
}

bool decode_run(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                float* out) {
  Coder coder(spec, count);
  bool finite = true;
  each_bucket(count, spec, scales, codes,
              [&](size_t begin, size_t size, const float* scale, const uint8_t* code) {
                finite &= coder.decode(scale, code, size, out + begin);
              });
  return finite;
}

void decode_add_run(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                    float* sum) {
  Coder coder(spec, count);
  std::vector<float> values(std::min<size_t>(count, spec.bucket));
  each_bucket(count, spec, scales, codes,
              [&](size_t begin, size_t size, const float* scale, const uint8_t* code) {
                coder.decode(scale, code, size, values.data());
                add(values.data(), size, sum + begin);
              });
}

}  // namespace qsgd
