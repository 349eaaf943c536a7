// The k elements of largest magnitude of a bucket, as they are: all their 16-bit places in rising
// order, then their float32 values. A last, shorter bucket keeps min(k, its size).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "quant/code.h"

namespace qsgd {
namespace {

// Least for the largest magnitude, and among equals for the first place: no two are equal, so the
// choice does not depend on how it is searched.
uint64_t rank_of(float x, size_t place) {
  const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffffu;
  return uint64_t{~magnitude} << 32 | place;
}

size_t kept(size_t count, const CodecSpec& spec) { return std::min<size_t>(count, spec.k); }

class TopK final : public BucketCode {
 public:
  // Its bits are those of an element that is kept.
  constexpr TopK() : BucketCode({"topk", 32, 32, 0, kKeeps | kBiased, 1}) {}

  size_t code_bytes(const CodecSpec& spec, size_t count) const override {
    const size_t rest = count % spec.bucket;
    return (count / spec.bucket * spec.k + kept(rest, spec)) * (sizeof(uint16_t) + sizeof(float));
  }

 private:
  // Of equal magnitudes the first are kept; NaN counts as the largest, so that it is seen.
  bool encode_bucket(const float* x, size_t count, uint64_t /*first*/, const CodecSpec& spec,
                     const NoiseKey& /*key*/, float* /*scales*/, uint8_t* codes,
                     Scratch& /*scratch*/) const override {
    const size_t keep = kept(count, spec);
    std::vector<uint64_t> ranks(count);
    for (size_t i = 0; i < count; ++i) ranks[i] = rank_of(x[i], i);
    const auto end = ranks.begin() + static_cast<std::ptrdiff_t>(keep);
    if (end != ranks.end()) std::nth_element(ranks.begin(), end, ranks.end());
    std::vector<uint16_t> places(keep);
    for (size_t i = 0; i < keep; ++i) places[i] = static_cast<uint16_t>(ranks[i]);
    std::sort(places.begin(), places.end());
    std::vector<float> values(keep);
    for (size_t i = 0; i < keep; ++i) values[i] = x[places[i]];
    std::memcpy(codes, places.data(), keep * sizeof(uint16_t));
    std::memcpy(codes + keep * sizeof(uint16_t), values.data(), keep * sizeof(float));
    return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
  }

  // A place outside the bucket is ignored.
  bool decode_bucket(const float* /*scales*/, const uint8_t* codes, size_t count,
                     const CodecSpec& spec, float* out, Scratch& /*scratch*/) const override {
    const size_t keep = kept(count, spec);
    const uint8_t* const values = codes + keep * sizeof(uint16_t);
    std::fill(out, out + count, 0.0f);
    bool finite = true;
    for (size_t i = 0; i < keep; ++i) {
      uint16_t place;
      float value;
      std::memcpy(&place, codes + i * sizeof place, sizeof place);
      std::memcpy(&value, values + i * sizeof value, sizeof value);
      if (place >= count) continue;
      out[place] = value;
      finite &= std::isfinite(value);
    }
    return finite;
  }
};

}  // namespace

const Code& topk_code() {
  static constexpr TopK code;
  return code;
}

}  // namespace qsgd
