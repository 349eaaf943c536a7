#include <algorithm>
#include <cstring>
#include <vector>

#include "quant/code.h"
#include "quant/convert.h"
#include "quant/kernels.h"

namespace qsgd {
namespace {

// Calls use(at, size, floats) for pieces of complete buckets that fit in the L1 cache; small, so
// that memory is read continuously.
template <class Use>
void by_pieces(size_t count, uint32_t bucket, const Use& use) {
  constexpr size_t kPiece = 2048;  // elements
  const size_t piece = std::max<size_t>(bucket, kPiece / bucket * bucket);
  std::vector<float> floats(std::min(count, piece));
  for (size_t at = 0; at < count; at += piece) {
    use(at, std::min(piece, count - at), floats.data());
  }
}

// Calls f(begin, size, scales, codes) for each bucket.
template <class Scales, class Codes, class F>
void each_bucket(size_t count, const CodecSpec& spec, Scales* scales, Codes* codes, const F& f) {
  for (size_t begin = 0; begin < count; begin += spec.bucket) {
    const size_t size = std::min<size_t>(spec.bucket, count - begin);
    f(begin, size, scales, codes);
    scales += spec.scales(size);
    codes += spec.code_bytes(size);
  }
}

}  // namespace

bool BucketCode::encode_floats(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                               const NoiseKey& key, float* scales, uint8_t* codes) const {
  Scratch scratch;
  bool finite = true;
  each_bucket(
      count, spec, scales, codes, [&](size_t begin, size_t size, float* scale, uint8_t* code) {
        finite &= encode_bucket(x + begin, size, first + begin, spec, key, scale, code, scratch);
      });
  return finite;
}

bool BucketCode::decode_floats(const float* scales, const uint8_t* codes, size_t count,
                               const CodecSpec& spec, float* out) const {
  Scratch scratch;
  bool finite = true;
  each_bucket(count, spec, scales, codes,
              [&](size_t begin, size_t size, const float* scale, const uint8_t* code) {
                finite &= decode_bucket(scale, code, size, spec, out + begin, scratch);
              });
  return finite;
}

bool BucketCode::encode(const void* x, DType dtype, size_t count, uint64_t first,
                        const CodecSpec& spec, const NoiseKey& key, float* scales,
                        uint8_t* codes) const {
  if (dtype == DType::kFloat32) {
    return encode_floats(static_cast<const float*>(x), count, first, spec, key, scales, codes);
  }
  const auto* const in = static_cast<const uint8_t*>(x);
  bool finite = true;
  by_pieces(count, spec.bucket, [&](size_t at, size_t size, float* floats) {
    float32_from(in + at * facts(dtype).size, dtype, size, floats);
    finite &= encode_floats(floats, size, first + at, spec, key, scales + spec.scales(at),
                            codes + spec.code_bytes(at));
  });
  return finite;
}

bool BucketCode::encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                                const CodecSpec& spec, const NoiseKey& key, float* scales,
                                uint8_t* codes, float* left) const {
  const auto* const in = static_cast<const uint8_t*>(x);
  Scratch scratch;
  bool finite = true;
  each_bucket(count, spec, scales, codes,
              [&](size_t begin, size_t size, float* scale, uint8_t* code) {
                float* const own = left + begin;
                scale_add(in + begin * facts(dtype).size, dtype, size, by, own, own, true);
                finite &= keep_bucket(own, size, first + begin, spec, key, scale, code, scratch);
              });
  return finite;
}

bool BucketCode::keep_bucket(float* left, size_t count, uint64_t first, const CodecSpec& spec,
                             const NoiseKey& key, float* scales, uint8_t* codes,
                             Scratch& scratch) const {
  scratch.kept.assign(left, left + count);
  const float* const value = scratch.kept.data();
  const bool finite = encode_bucket(value, count, first, spec, key, scales, codes, scratch);
  decode_bucket(scales, codes, count, spec, left, scratch);
  keep_rest(value, count, left);
  return finite;
}

bool BucketCode::decode(const float* scales, const uint8_t* codes, size_t count,
                        const CodecSpec& spec, void* out, DType dtype) const {
  if (dtype == DType::kFloat32) {
    return decode_floats(scales, codes, count, spec, static_cast<float*>(out));
  }
  auto* const to = static_cast<uint8_t*>(out);
  bool finite = true;
  by_pieces(count, spec.bucket, [&](size_t at, size_t size, float* floats) {
    finite &=
        decode_floats(scales + spec.scales(at), codes + spec.code_bytes(at), size, spec, floats);
    finite &= float32_to(floats, size, dtype, to + at * facts(dtype).size);
  });
  return finite;
}

void BucketCode::decode_add(const float* scales, const uint8_t* codes, size_t count,
                            const CodecSpec& spec, float* sum) const {
  Scratch scratch;
  each_bucket(count, spec, scales, codes,
              [&](size_t begin, size_t size, const float* scale, const uint8_t* code) {
                add_bucket(scale, code, size, spec, sum + begin, scratch);
              });
}

void BucketCode::add_bucket(const float* scales, const uint8_t* codes, size_t count,
                            const CodecSpec& spec, float* sum, Scratch& scratch) const {
  scratch.values.resize(count);
  decode_bucket(scales, codes, count, spec, scratch.values.data(), scratch);
  kernels().add(sum, scratch.values.data(), count);
}

bool IntegerCode::encode_bucket(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                                const NoiseKey& key, float* scales, uint8_t* codes,
                                Scratch& scratch) const {
  const size_t whole = tiles_of(count) * kTile;
  scratch.integers.resize(whole);
  uint8_t* const integers = scratch.integers.data();
  const bool draws = traits.has(kRounds) && spec.rounding == Rounding::kStochastic;
  if (draws) {
    scratch.noise.resize(whole);
    noise(key, first / kTile, tiles_of(count), scratch.noise.data());
  }
  std::memset(integers + count, 0, whole - count);
  const uint16_t* const drawn = draws ? scratch.noise.data() : nullptr;
  const bool finite = encode_integers(x, count, spec, drawn, scales, integers);
  kernels().pack[spec.bits](integers, tiles_of(count), codes);
  return finite;
}

bool IntegerCode::decode_bucket(const float* scales, const uint8_t* codes, size_t count,
                                const CodecSpec& spec, float* out, Scratch& scratch) const {
  scratch.integers.resize(tiles_of(count) * kTile);
  kernels().unpack[spec.bits](codes, tiles_of(count), scratch.integers.data());
  decode_integers(scales, scratch.integers.data(), count, spec, out);
  return all_finite(scales, spec.scales(count));
}

}  // namespace qsgd
