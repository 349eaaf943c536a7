// Norm and codes of a bucket in registers. The arithmetic equals that of the CPU's codec, step by
// step, so that the bytes are the same: compile without fused multiply-add and with exact division.
#pragma once

#include <cmath>

#include "gpu/pieces.h"
#include "gpu/tile.h"

namespace qsgd::gpu {

constexpr float kLift = 0x1p64f;  // makes the inverse of the smallest norms finite

// Largest magnitude, as bits. Compared as signed integers, the largest bits are those of the
// largest positive value; as unsigned ones, those of the largest negative value, if any.
__device__ __forceinline__ uint32_t largest_magnitude(const float* value) {
  int32_t positive = 0;
  uint32_t negative = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const uint32_t bits = __float_as_uint(value[i]);
    const auto number = static_cast<int32_t>(bits);
    positive = positive > number ? positive : number;
    negative = negative > bits ? negative : bits;
  }
  negative &= 0x7fffffffu;
  const auto most = static_cast<uint32_t>(positive);
  return most > negative ? most : negative;
}

// Maximum over `lanes` consecutive lanes, a power of two; all of them get it.
__device__ __forceinline__ uint32_t max_of_lanes(uint32_t most, int lanes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if (lanes == kLanes) return __reduce_max_sync(kAllLanes, most);
#endif
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    const uint32_t other = lane_xor(most, mask);
    most = most > other ? most : other;
  }
  return most;
}

__device__ __forceinline__ uint64_t sum_of_lanes(uint64_t sum) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += lane_xor(sum, mask);
  return sum;
}

__device__ __forceinline__ float norm_of_magnitude(uint32_t most) {
  return most < kInfinity ? __uint_as_float(most) : __uint_as_float(0x7fc00000u);
}

__device__ __forceinline__ float norm_of_energy(double energy) {
  const double l2 = sqrt(energy);
  if (!(l2 <= 0x1.fffffffffffffp1023)) return __uint_as_float(0x7fc00000u);
  // Finite elements can have a norm beyond float32, which must not become the mark for "not
  // finite".
  return l2 > static_cast<double>(kMost) ? kMost : static_cast<float>(l2);
}

// The sum of squares of a bucket in the CPU's order: element i goes to partial sum i % 32. Lane s
// has partial sum s; it reads the elements through `staged`.
class Energy {
 public:
  __device__ __forceinline__ explicit Energy(float* staged) : staged_(staged) {}

  // Adds the first `count` elements of a span.
  __device__ __forceinline__ void add(const float* value, uint32_t lane, uint32_t count) {
    const uint32_t tile = lane / kTileLanes * kTile, j = lane % kTileLanes;
    sync_lanes();  // the last span has been read
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
      for (int c = 0; c < 4; ++c) staged_[tile + 16 * p + 4 * j + c] = value[4 * p + c];
    }
    sync_lanes();
    for (uint32_t at = lane; at < count && at < kSpan; at += kLanes) {
      const double x = static_cast<double>(staged_[at]);
      sum_ += x * x;
    }
  }

  // Returned on every lane.
  __device__ __forceinline__ double total() const {
    double sum = sum_;
    for (int half = kLanes / 2; half > 0; half /= 2) sum += lane_down(sum, half);
    return lane_get(sum, 0);
  }

 private:
  float* staged_;
  double sum_ = 0;
};

// Packs the third byte of each word: the integer parts of four fixed-point numbers.
__device__ __forceinline__ uint32_t third_bytes(const uint32_t* of) {
  return __byte_perm(__byte_perm(of[0], of[1], 0x62), __byte_perm(of[2], of[3], 0x62), 0x5410);
}

// Conversion of a bucket's elements to fixed-point numbers with 16 fractional bits: the scale, and
// a lift for the smallest norms.
struct Grid {
  __device__ __forceinline__ Grid(float norm, int levels) {
    const float whole = static_cast<float>(levels) * 0x1p16f;
    scale = whole / norm;
    lifted = !(scale <= kMost);
    if (lifted) scale = whole / (norm * kLift);
  }
  // Exact in both directions.
  __device__ __forceinline__ void lift(float* value, float by) const {
    if (!lifted) return;
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] *= by;
  }
  float scale;
  bool lifted;
};

// Codes a lane's elements of tile `tile`, four to a word, and packs them to `codes`, its place in a
// message, if `mine`. Returns the sum of f (1 - f), in units of 2^-32, where f is the distance of
// an element from its lower level; 0 with kPlain, for codes that round stochastically and do not
// contract.
template <bool kPlain>
__device__ __forceinline__ uint64_t quantize(float* value, float norm, const Code& code,
                                             const Philox& philox, uint64_t tile, uint32_t j,
                                             uint32_t* codes, bool mine, uint32_t* word) {
  uint64_t variance = 0;
  if (norm > 0) {
    uint32_t noise[kMine];  // including the level of zero
    if (kPlain || !code.nearest) draw(philox, tile, j, code.levels, noise);
    const Grid grid(norm, code.levels);
    grid.lift(value, kLift);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      uint32_t level[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int i = 4 * p + c, number = __float2int_rn(value[i] * grid.scale);
        if constexpr (!kPlain) {
          const uint64_t fraction = static_cast<uint32_t>(number) & 0xffffu;
          variance += fraction * (0x10000u - fraction);
          // One less for negative numbers: ties round away from zero on both sides.
          if (code.nearest) noise[i] = (code.levels << 16) + (1 << 15) + (number >> 31);
        }
        level[c] = static_cast<uint32_t>(number) + noise[i];
      }
      word[p] = third_bytes(level);
    }
    grid.lift(value, 1 / kLift);
  } else {  // zeros, or not finite
#pragma unroll
    for (int p = 0; p < 4; ++p) word[p] = static_cast<uint32_t>(code.levels) * 0x01010101u;
  }
  pack(word, code.bits, j, codes, mine);
  return variance;
}

// The scale sent for a bucket: less than its norm if the code must contract.
__device__ __forceinline__ float contracted(float norm, int levels, uint64_t variance,
                                            double energy) {
  const double unit = static_cast<double>(norm) / levels;
  const double w = unit * unit * (static_cast<double>(variance) * 0x1p-32) / energy;
  return norm * (w >= 1 ? static_cast<float>(1 / (1 + w)) : 1.0f);
}

}  // namespace qsgd::gpu
