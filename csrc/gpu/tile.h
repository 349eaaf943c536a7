// A tile of 64 elements in the registers of four lanes. Lane j of the four has elements
// 16 p + 4 j + c of the tile, p and c below 4, in value[4 p + c]: what it reads lies in runs of
// four, and what it packs in words of four bytes, whatever the number of bits.
#pragma once

#include "common/dtype.h"
#include "gpu/runtime.h"
#include "quant/philox.h"

namespace qsgd::gpu {

constexpr int kMine = 16;  // elements of a lane
constexpr int kTileLanes = kTile / kMine;
constexpr int kSpan = kLanes * kMine;  // elements of all lanes

// Four elements as they lie in memory, read and written at once.
template <class Real>
struct alignas(4 * sizeof(Real)) Four {
  Real value[4];
};
template <>
struct alignas(16) Four<double> {  // 16 bytes are the most that one access has
  double value[4];
};

// Elements of a user's array, of which those from `count` on read as 0 and are not written.
template <class Real>
struct Array {
  Real* data;
  size_t count;
  bool aligned;  // runs of four at multiples of four lie as Four<Real> asks

  __device__ __forceinline__ static Array of(Real* data, size_t count) {
    return {data, count, reinterpret_cast<uintptr_t>(data) % alignof(Four<Real>) == 0};
  }

  __device__ __forceinline__ void load(size_t tile, int j, float* value) const {
    const size_t first = tile + 4 * j;
    if (aligned && tile + kTile <= count) {
      Four<Real> four[4];  // all on their way before one is used
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        four[p] = *reinterpret_cast<const Four<Real>*>(data + first + 16 * p);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) value[i] = static_cast<float>(four[i / 4].value[i % 4]);
    } else {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const size_t at = first + 16 * (i / 4) + i % 4;
        value[i] = at < count ? static_cast<float>(data[at]) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void store(size_t tile, int j, const float* value) const {
    const size_t first = tile + 4 * j;
    if (aligned && tile + kTile <= count) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        Four<Real> four;
#pragma unroll
        for (int c = 0; c < 4; ++c) four.value[c] = static_cast<Real>(value[4 * p + c]);
        *reinterpret_cast<Four<Real>*>(data + first + 16 * p) = four;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        const size_t at = first + 16 * (i / 4) + i % 4;
        if (at < count) data[at] = static_cast<Real>(value[i]);
      }
    }
  }
};

// 16 bits for each of the lane's elements.
__device__ __forceinline__ void draw(const Philox& philox, uint64_t tile, int j, int* noise) {
#pragma unroll
  for (int z = 0; z < 2; ++z) {
    const PhiloxBlock block = philox.block(tile * kTileBlocks + 2 * j + z);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      noise[8 * z + c] = static_cast<int>(block.word[c] & 0xffffu);
      noise[8 * z + 4 + c] = static_cast<int>(block.word[c] >> 16);
    }
  }
}

// The fields of a tile, as quant/codec.h lays them out: where each begins, in words of four bytes.
struct Fields {
  __device__ __forceinline__ explicit Fields(int bits)
      : bits(bits), four(bits >= 4), two((bits & 2) != 0), one((bits & 1) != 0) {}
  __device__ __forceinline__ int begin_of_two() const { return four ? 8 : 0; }
  __device__ __forceinline__ int begin_of_one() const { return begin_of_two() + (two ? 4 : 0); }
  int bits;
  bool four, two, one;
};

// Writes the tile's codes, of which the lane has byte c of code[p]. All lanes must come here, those
// without a tile with `out` null.
__device__ __forceinline__ void pack(const uint32_t* code, int bits, int j, uint32_t* out) {
  const Fields fields(bits);
  if (bits == 8) {
    if (out != nullptr) {
#pragma unroll
      for (int p = 0; p < 4; ++p) out[4 * p + j] = code[p];
    }
    return;
  }
  if (fields.four && out != nullptr) {
    const int shift = bits - 4;
    constexpr uint32_t kLow = 0x0f0f0f0fu;
    out[j] = ((code[0] >> shift) & kLow) | ((code[2] >> shift) & kLow) << 4;
    out[4 + j] = ((code[1] >> shift) & kLow) | ((code[3] >> shift) & kLow) << 4;
  }
  if (fields.two && out != nullptr) {
    const int shift = bits & 1;
    uint32_t word = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) word |= ((code[p] >> shift) & 0x03030303u) << (2 * p);
    out[fields.begin_of_two() + j] = word;
  }
  if (fields.one) {
    uint32_t word = 0;
#pragma unroll
    for (int p = 0; p < 4; ++p) word |= (code[p] & 0x01010101u) << (2 * p + j / 2);
    word |= lane_xor(word, 2);  // lanes j and j + 2 share bytes
    if (j < 2 && out != nullptr) out[fields.begin_of_one() + j] = word;
  }
}

// The inverse, for one lane by itself.
__device__ __forceinline__ void unpack(const uint32_t* in, int bits, int j, uint32_t* code) {
  const Fields fields(bits);
#pragma unroll
  for (int p = 0; p < 4; ++p) code[p] = bits == 8 ? in[4 * p + j] : 0;
  if (bits == 8) return;
  if (fields.four) {
    const int shift = bits - 4;
    constexpr uint32_t kLow = 0x0f0f0f0fu;
    const uint32_t even = in[j], odd = in[4 + j];
    code[0] = (even & kLow) << shift;
    code[1] = (odd & kLow) << shift;
    code[2] = ((even >> 4) & kLow) << shift;
    code[3] = ((odd >> 4) & kLow) << shift;
  }
  if (fields.two) {
    const int shift = bits & 1;
    const uint32_t word = in[fields.begin_of_two() + j];
#pragma unroll
    for (int p = 0; p < 4; ++p) code[p] |= ((word >> (2 * p)) & 0x03030303u) << shift;
  }
  if (fields.one) {
    const uint32_t word = in[fields.begin_of_one() + j % 2];
#pragma unroll
    for (int p = 0; p < 4; ++p) code[p] |= (word >> (2 * p + j / 2)) & 0x01010101u;
  }
}

}  // namespace qsgd::gpu
