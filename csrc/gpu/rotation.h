// EDEN's rotations of a bucket in registers, equal step by step to those of the CPU's codec
// (quant/eden_loops.h).
//
// Initially element 64 t + 16 p + 4 j + c of a bucket is value[4 p + c] of lane 4 t + j, as in
// tile.h (outer layout). A butterfly between lanes would need a shuffle per value. Instead two
// lanes swap halves, which needs half as many and makes the next bit of the element number a bit of
// the register number. Thus the outer layout becomes an inner one while distances increase, and is
// restored while they decrease.
#pragma once

#include "gpu/pieces.h"
#include "gpu/tile.h"
#include "quant/eden.h"

namespace qsgd::gpu {

constexpr uint32_t kMostRotated = kSpan;  // elements of a bucket

class Rotation {
 public:
  // `part`: lane among those of the bucket. `size`: number of rotated elements, a power of two; 0:
  // none.
  __device__ __forceinline__ Rotation(uint32_t bucket, uint32_t size, uint32_t part)
      : bucket_(bucket), size_(size), part_(part) {}

  // All lanes of a warp must call each of these functions.
  __device__ __forceinline__ void rise(float* value) const {
    cross<0>(value);
    cross<1>(value);
    swap<0>(value, 1);
    cross<0>(value);
    swap<1>(value, 2);
    cross<1>(value);
    cross<2>(value);
    cross<3>(value);
    if (bucket_ > 64) {
      swap<0>(value, 4);
      if (size_ > 64) cross<0>(value);
    }
    if (bucket_ > 128) {
      swap<1>(value, 8);
      if (size_ > 128) cross<1>(value);
    }
    if (bucket_ > 256) {
      swap<2>(value, 16);
      if (size_ > 256) cross<2>(value);
    }
  }
  __device__ __forceinline__ void fall(float* value) const {
    if (bucket_ > 256) {
      if (size_ > 256) cross<2>(value);
      swap<2>(value, 16);
    }
    if (bucket_ > 128) {
      if (size_ > 128) cross<1>(value);
      swap<1>(value, 8);
    }
    if (bucket_ > 64) {
      if (size_ > 64) cross<0>(value);
      swap<0>(value, 4);
    }
    cross<3>(value);
    cross<2>(value);
    cross<1>(value);
    swap<1>(value, 2);
    cross<0>(value);
    swap<0>(value, 1);
    cross<1>(value);
    cross<0>(value);
  }

  // Apply the signs of the first rotation, in the outer layout,
  __device__ __forceinline__ void flip_outer(float* value, uint32_t seed) const {
    flip(value, seed, 0, part_ / kTileLanes * kTile + part_ % kTileLanes * 4, 1, 2, 16, 32);
  }
  // and those of the second one, in the inner layout.
  __device__ __forceinline__ void flip_inner(float* value, uint32_t seed) const {
    flip(value, seed, 1, part_, bucket_ > 64 ? 64 : 4, bucket_ > 128 ? 128 : 8,
         bucket_ > 256 ? 256 : 16, 32);
  }

  // Sum over the bucket of terms in the outer layout, in the CPU's order.
  __device__ __forceinline__ float sum(const float* term) const {
    float row[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      row[c] = (term[c] + term[4 + c]) + (term[8 + c] + term[12 + c]);
    }
    // Between lanes, tiles first. At the first two distances, each lane keeps half of its rows.
    const int one = bucket_ > kTile ? kTileLanes : 2;
    const int other = bucket_ > 2 * kTile ? 2 * kTileLanes : one / 2;
    halve(row, 2, one);
    halve(row, 1, other);
    float sum = row[0];
    for (int mask = 4 * kTileLanes; mask < static_cast<int>(bucket_) / kMine; mask *= 2) {
      sum += lane_xor(sum, mask);
    }
    if (bucket_ > kTile) {
      if (bucket_ > 2 * kTile) sum += lane_xor(sum, 2);
      sum += lane_xor(sum, 1);
    }
    sum += lane_xor(sum, one);
    return sum + lane_xor(sum, other);
  }

 private:
  // Butterflies between registers whose numbers differ in this bit.
  template <int Bit>
  __device__ __forceinline__ static void cross(float* value) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if ((i & (1 << Bit)) != 0) continue;
      const float a = value[i], b = value[i | (1 << Bit)];
      value[i] = a + b;
      value[i | (1 << Bit)] = a - b;
    }
  }

  // Of 2 * half rows, keeps one half and adds that of the other lane: the upper lane the upper
  // half.
  __device__ __forceinline__ void halve(float* row, int half, int mask) const {
    const bool upper = (part_ & static_cast<uint32_t>(mask)) != 0;
#pragma unroll
    for (int c = 0; c < half; ++c) {
      const float sent = upper ? row[c] : row[c + half];
      row[c] = (upper ? row[c + half] : row[c]) + lane_xor(sent, mask);
    }
  }

  // Exchanges this bit of the register number with a bit of the lane number.
  template <int Bit>
  __device__ __forceinline__ void swap(float* value, int mask) const {
    const bool upper = (part_ & static_cast<uint32_t>(mask)) != 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      if ((i & (1 << Bit)) != 0) continue;
      float& low = value[i];
      float& high = value[i | (1 << Bit)];
      const float got = lane_xor(upper ? low : high, mask);
      low = upper ? got : low;
      high = upper ? high : got;
    }
  }

  // Element `first` is in register 0; each bit of a register number stands for `bit0` to `bit3`
  // elements. The two highest are multiples of 16, so that four words contain all signs.
  __device__ __forceinline__ static void flip(float* value, uint32_t seed, uint32_t which,
                                              uint32_t first, uint32_t bit0, uint32_t bit1,
                                              uint32_t bit2, uint32_t bit3) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t element = first + (i & 1 ? bit0 : 0) + (i & 2 ? bit1 : 0);
      uint32_t x = eden_sign_counter(seed, which, element % kSignWords);
      x = (x ^ (x >> 16)) * kSignHash1;
      x = (x ^ (x >> 15)) * kSignHash2;
      word[i] = x ^ (x >> 16);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const uint32_t element =
          first + (i & 1 ? bit0 : 0) + (i & 2 ? bit1 : 0) + (i & 4 ? bit2 : 0) + (i & 8 ? bit3 : 0);
      const uint32_t sign = (word[i % 4] << (element / kSignWords)) & 0x80000000u;
      value[i] = __uint_as_float(__float_as_uint(value[i]) ^ sign);
    }
  }

  uint32_t bucket_, size_, part_;
};

}  // namespace qsgd::gpu
