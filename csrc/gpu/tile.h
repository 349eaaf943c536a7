// A tile of 64 elements in the registers of four lanes. Lane j has elements 16 p + 4 j + c, with p
// and c below 4, in value[4 p + c]: it reads runs of four elements, and packs words of four bytes
// for any number of bits.
#pragma once

#include "common/dtype.h"
#include "gpu/pieces.h"
#include "gpu/runtime.h"
#include "quant/philox.h"

namespace qsgd::gpu {

constexpr int kMine = 16;  // elements per lane
constexpr int kTileLanes = kTile / kMine;
constexpr int kSpan = kLanes * kMine;  // elements of all lanes

// Four consecutive elements, accessed together.
template <class Real>
struct alignas(4 * sizeof(Real)) Four {
  Real value[4];
};
template <>
struct alignas(16) Four<double> {  // the maximum size of one access
  double value[4];
};

// A lane's elements of an array that begins with the piece. Elements beyond the piece read as 0 and
// are not written.
template <class Real>
class Mine {
 public:
  __device__ __forceinline__ Mine(Real* data, const Part& part)
      : data_(data + part.at),
        part_(part),
        // Whether runs of four have the alignment of Four<Real>.
        at_once_(part.left >= kTile &&
                 reinterpret_cast<uintptr_t>(data_) % alignof(Four<Real>) == 0) {}

  __device__ __forceinline__ void load(float* value) const {
    if (at_once_) {
      Four<Real> four[4];  // all loads in flight before the first use
#pragma unroll
      for (int p = 0; p < 4; ++p) four[p] = run(p);
#pragma unroll
      for (int i = 0; i < kMine; ++i) value[i] = static_cast<float>(four[i / 4].value[i % 4]);
    } else {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        value[i] = part_.has(i) ? static_cast<float>(element(i)) : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void store(const float* value) const {
    if (at_once_) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        Four<Real> four;
#pragma unroll
        for (int c = 0; c < 4; ++c) four.value[c] = static_cast<Real>(value[4 * p + c]);
        run(p) = four;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (part_.has(i)) element(i) = static_cast<Real>(value[i]);
      }
    }
  }

 private:
  // Computed separately from data_: nvcc splits the access if element() begins with the same
  // pointer.
  __device__ __forceinline__ Four<Real>& run(uint32_t p) const {
    return reinterpret_cast<Four<Real>*>(data_)[4 * p + part_.j];
  }
  __device__ __forceinline__ Real& element(uint32_t i) const {
    return data_[16 * (i / 4) + 4 * part_.j + i % 4];
  }

  Real* data_;
  const Part& part_;
  bool at_once_;
};

// Draws 16 bits for each of the lane's elements, with byte `above` as the third byte.
__device__ __forceinline__ void draw(const Philox& philox, uint64_t tile, uint32_t j,
                                     uint32_t above, uint32_t* noise) {
#pragma unroll
  for (int z = 0; z < 2; ++z) {
    const PhiloxBlock block = philox.block(tile * kTileBlocks + 2 * j + z);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      noise[8 * z + c] = __byte_perm(block.word[c], above, 0x5410);
      noise[8 * z + 4 + c] = __byte_perm(block.word[c], above, 0x5432);
    }
  }
}

// The fields of a tile, as laid out in quant/codec.h: the first word of each, in words of four
// bytes.
struct Fields {
  __device__ __forceinline__ explicit Fields(int bits)
      : bits(bits), four(bits >= 4), two((bits & 2) != 0), one((bits & 1) != 0) {}
  __device__ __forceinline__ int begin_of_two() const { return four ? 8 : 0; }
  __device__ __forceinline__ int begin_of_one() const { return begin_of_two() + (two ? 4 : 0); }
  int bits;
  bool four, two, one;
};

constexpr uint32_t kLow = 0x0f0f0f0fu;

// Writes the tile's codes; the lane has byte c of code[p]. All lanes must call this, those without
// a tile with `mine` false.
__device__ __forceinline__ void pack(const uint32_t* code, int bits, uint32_t j, uint32_t* out,
                                     bool mine) {
  if (bits == 8) {  // 8 and 4 bits are the usual cases, and must be fast
    if (!mine) return;
#pragma unroll
    for (int p = 0; p < 4; ++p) out[4 * p + j] = code[p];
    return;
  }
  if (bits == 4) {
    if (!mine) return;
    out[j] = code[0] | code[2] << 4;
    out[4 + j] = code[1] | code[3] << 4;
    return;
  }
  const Fields fields(bits);
  if (fields.four && mine) {
    const int shift = bits - 4;
    out[j] = ((code[0] >> shift) & kLow) | ((code[2] >> shift) & kLow) << 4;
    out[4 + j] = ((code[1] >> shift) & kLow) | ((code[3] >> shift) & kLow) << 4;
  }
  if (fields.two && mine) {
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
    if (j < 2 && mine) out[fields.begin_of_one() + j] = word;
  }
}

// The inverse, for a single lane.
__device__ __forceinline__ void unpack(const uint32_t* in, int bits, uint32_t j, uint32_t* code) {
  if (bits == 8) {
#pragma unroll
    for (int p = 0; p < 4; ++p) code[p] = in[4 * p + j];
    return;
  }
  if (bits == 4) {
    const uint32_t even = in[j], odd = in[4 + j];
    code[0] = even & kLow;
    code[1] = odd & kLow;
    code[2] = (even >> 4) & kLow;
    code[3] = (odd >> 4) & kLow;
    return;
  }
  const Fields fields(bits);
#pragma unroll
  for (int p = 0; p < 4; ++p) code[p] = 0;
  if (fields.four) {
    const int shift = bits - 4;
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
