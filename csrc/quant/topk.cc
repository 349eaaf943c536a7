#include "quant/topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace qsgd {
namespace {

// Least for the largest magnitude, and among equals for the first place: no two are equal, so the
// choice does not depend on how it is searched.
uint64_t rank_of(float x, size_t place) {
  const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffffu;
  return uint64_t{~magnitude} << 32 | place;
}

size_t kept(size_t count, const CodecSpec& spec) { return std::min<size_t>(count, spec.k); }

}  // namespace

bool topk_encode(const float* x, size_t count, const CodecSpec& spec, uint8_t* codes) {
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

bool topk_decode(const uint8_t* codes, size_t count, const CodecSpec& spec, float* out) {
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

}  // namespace qsgd
