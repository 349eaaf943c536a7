// QSGD with the L2 norm and the paper's sparse code, of variable length: on average at most 2.8 n +
// 32 bits for sqrt(n) levels. Alistarh et al., QSGD, NeurIPS 2017, Theorem 3.2.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "quant/code.h"
#include "quant/grid.h"
#include "quant/omega.h"

namespace qsgd {
namespace {

constexpr double kPi = 3.14159265358979323846;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct LinearGrid : SignedLevels {
  using Real = float;
  float norm;

  QSGD_INLINE Place<float> place(float x) const {
    const float most = static_cast<float>(levels);
    const float ratio = std::fabs(x) / norm * most;
    const float r = ratio < most ? ratio : most;  // rounding may give an element above the norm
    const int level = static_cast<int>(r);
    return {level, r - static_cast<float>(level), norm / most};
  }
};

QSGD_CLONES
float norm_of(const float* x, size_t count) { return l2_norm(x, count); }

// Returns the scale; `norm` must be above 0.
QSGD_CLONES
float round_levels(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                   float norm, uint8_t* code) {
  const LinearGrid grid{{spec.levels()}, norm};
  round_to(grid, x, count, spec, noise, code);
  return static_cast<float>(double{norm} * contraction(grid, x, count, spec));
}

// Maximum size: all levels are the highest. Zeros between them are shorter.
size_t most_bytes(const CodecSpec& spec, size_t count) {
  const auto each = static_cast<size_t>(2 + omega(static_cast<uint32_t>(spec.levels())).length);
  return (count * each + 7) / 8;
}

size_t slot_bytes(const CodecSpec& spec, size_t count) {
  return count == 0 ? 0 : sizeof(SlotLength) + most_bytes(spec, count);
}

// Mean of max(|x| - t, 0) for normally distributed x with this sigma; levels are 1 apart.
double beyond(double t, double sigma) {
  const double z = t / sigma;
  const double density = std::exp(-z * z / 2) / std::sqrt(2 * kPi);
  return 2 * sigma * density - t * std::erfc(z / std::sqrt(2.0));
}

// Mean number of bits of a bucket of normally distributed elements, without the norm. The
// probability of level k is the second difference of beyond(); distances are geometrically
// distributed.
double mean_bits(const CodecSpec& spec, size_t count) {
  const double n = static_cast<double>(count), sigma = spec.levels() / std::sqrt(n);
  double nonzero = 0, bits = 3.5;  // of its last byte
  for (int k = 1; k <= spec.levels(); ++k) {
    const double p = beyond(k - 1, sigma) - 2 * beyond(k, sigma) + beyond(k + 1, sigma);
    nonzero += p;
    bits += n * p * (1 + omega(static_cast<uint32_t>(k)).length);
  }
  double reached = nonzero;  // probability of this distance
  for (size_t gap = 1; gap <= count; ++gap) {
    bits += (n * nonzero + 1) * reached * omega(static_cast<uint32_t>(gap)).length;  // and the end
    reached *= 1 - nonzero;
  }
  return bits;
}

// Cached, because the planner calls it repeatedly with the same arguments.
double remembered_mean_bits(const CodecSpec& spec, size_t count) {
  static std::mutex mutex;
  static std::map<std::pair<int, size_t>, double> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [it, fresh] = known.try_emplace({spec.bits, count}, 0);
  if (fresh) it->second = mean_bits(spec, count);
  return it->second;
}

class Elias final : public BucketCode {
 public:
  // Its bits are those of an uncoded level with its sign.
  constexpr Elias() : BucketCode({"elias", 2, 8, 1, kRounds | kVaries}) {}

  size_t code_bytes(const CodecSpec& spec, size_t count) const override {
    return count / spec.bucket * slot_bytes(spec, spec.bucket) +
           slot_bytes(spec, count % spec.bucket);
  }

  double mean_code_bytes(const CodecSpec& spec, size_t count) const override {
    if (count == 0) return 0;
    const size_t size = std::min<size_t>(count, spec.bucket);
    const double buckets = static_cast<double>(count) / static_cast<double>(size);
    return buckets * (sizeof(SlotLength) + remembered_mean_bits(spec, size) / 8);
  }

 private:
  bool encode_bucket(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                     const NoiseKey& key, float* scales, uint8_t* codes,
                     Scratch& scratch) const override {
    std::memset(codes, 0, slot_bytes(spec, count));
    const float norm = norm_of(x, count);
    scales[0] = norm;
    if (!(norm > 0)) return norm == 0;  // no codes: all elements decode to the norm, 0 or NaN
    const size_t tiles = tiles_of(count);
    scratch.integers.resize(tiles * kTile);
    scratch.noise.resize(tiles * kTile);
    if (spec.rounding == Rounding::kStochastic)
      noise(key, first / kTile, tiles, scratch.noise.data());
    uint8_t* const levels = scratch.integers.data();
    scales[0] = round_levels(x, count, spec, scratch.noise.data(), norm, levels);
    BitWriter out(scratch.bytes);
    put_sparse(out, count, [&](size_t i) { return int32_t{levels[i]} - spec.levels(); });
    out.finish();
    const auto length = static_cast<SlotLength>(scratch.bytes.size());
    std::memcpy(codes, &length, sizeof length);
    std::memcpy(codes + sizeof length, scratch.bytes.data(), length);
    scratch.bytes.clear();
    return true;
  }

  bool decode_bucket(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                     float* out, Scratch& /*scratch*/) const override {
    const float norm = scales[0];
    const size_t length = used_bytes(codes);
    std::fill(out, out + count, std::isfinite(norm) ? 0.0f : kNan);
    if (!(norm > 0) || !std::isfinite(norm)) return std::isfinite(norm);
    try {
      BitReader in(codes + sizeof(SlotLength), std::min(length, most_bytes(spec, count)));
      const float gap = norm / static_cast<float>(spec.levels());
      get_sparse(in, count, [&](size_t i, uint32_t level, bool negative) {
        // The largest level of a norm that is nearly the largest float may round beyond it.
        const float size = std::min(gap * static_cast<float>(level), kLargestFloat);
        out[i] = negative ? -size : size;
      });
    } catch (const Error&) {  // not written by any encoder
      std::fill(out, out + count, kNan);
      return false;
    }
    return std::all_of(out, out + count, [](float v) { return std::isfinite(v); });
  }
};

}  // namespace

const Code& elias_code() {
  static constexpr Elias code;
  return code;
}

}  // namespace qsgd
