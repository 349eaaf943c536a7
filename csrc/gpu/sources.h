// Sources of an encoder's elements, with their residuals.
#pragma once

#include "gpu/pieces.h"
#include "gpu/tile.h"
#include "gpu/values.h"

namespace qsgd::gpu {

__device__ __forceinline__ float* floats(uint64_t address) {
  return reinterpret_cast<float*>(address);
}

// Adds the residuals of a lane's elements.
__device__ __forceinline__ void add_residual(uint64_t residual, const Part& part, float* value) {
  if (residual == 0) return;
  float left[kMine];
  Mine<float>(floats(residual), part).load(left);
#pragma unroll
  for (int i = 0; i < kMine; ++i) value[i] += left[i];
}

// Stores the coding error. Values that are not finite would persist, and are dropped.
__device__ __forceinline__ void set_residual(uint64_t residual, const Part& part,
                                             const float* left) {
  if (residual == 0) return;
  float kept[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) kept[i] = is_finite(left[i]) ? left[i] : 0.0f;
  Mine<float>(floats(residual), part).store(kept);
}

// Source: an array. kBlocks: thread blocks per multiprocessor, so that some compute while others
// wait for memory.
template <class Real>
struct FromArray {
  static constexpr int kBlocks = 8;
  Real* data;

  __device__ __forceinline__ Mine<Real> mine(const Piece& piece, const Part& part) const {
    return Mine<Real>(data + piece.at, part);
  }
  __device__ __forceinline__ void load(const Bucket& bucket, const Part& part, float* value) const {
    mine(bucket.piece, part).load(value);
    add_residual(bucket.piece.residual, part, value);
  }
  __device__ __forceinline__ bool keeps(const Piece& piece) const { return piece.residual != 0; }
  __device__ __forceinline__ void keep(const Piece& piece, const Part& part,
                                       const float* left) const {
    set_residual(piece.residual, part, left);
  }
};

// Source: the sum over ranks of decoded messages, and of an array.
template <class Real>
struct FromSum {
  static constexpr int kBlocks = 6;
  FromArray<Real> input;
  Addends addends;
  Code code;

  __device__ __forceinline__ void load(const Bucket& bucket, const Part& part, float* value) const {
    if (part.empty()) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) value[i] = 0;
      return;
    }
    float mine[kMine];
    if (addends.own >= 0) input.load(bucket, part, mine);  // in flight while codes are read
    const uint8_t* scale = addends.messages + scale_at(bucket);
    const uint8_t* codes = addends.messages + codes_at(bucket.piece, code, part);
    // The own addend follows that of the rank before it. If it is the first, the first two are
    // exchanged, which does not change their sum.
    const int before = addends.own != 0 ? addends.own - 1 : addends.ranks > 1 ? 1 : 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] = 0;
#pragma unroll 1
    for (int rank = 0; rank < addends.ranks; ++rank) {
      if (rank != addends.own) {
        const Coded coded(scale, codes, code, part.j);
        Values(coded.scale, code).each(coded.word, [&](int i, float x) { value[i] += x; });
      }
      if (rank == before) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) value[i] += mine[i];
      }
      scale += addends.stride;
      codes += addends.stride;
    }
    finish(bucket.piece, part, value);
  }
  // Completes the sum of a lane's elements.
  __device__ __forceinline__ void finish(const Piece& piece, const Part& part, float* value) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] *= addends.factor;
    if (part.left < kTile) {
      // Padding of a message after the piece's end need not decode to zero.
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (!part.has(i)) value[i] = 0;
      }
    }
    add_residual(piece.owner_residual, part, value);
  }
  __device__ __forceinline__ bool keeps(const Piece& piece) const {
    return piece.residual != 0 || piece.owner_residual != 0;
  }
  __device__ __forceinline__ void keep(const Piece& piece, const Part& part,
                                       const float* left) const {
    const float sent[kMine] = {};  // zero: this rank's own addend was not coded
    set_residual(piece.residual, part, sent);
    set_residual(piece.owner_residual, part, left);
  }
};

// A sum that is written uncoded, by the kernels that otherwise write decoded values.
template <class Sum>
struct Summing : Sum {
  Pieces pieces;

  __device__ __forceinline__ void report(const Bucket& /*bucket*/) const {}
};

}  // namespace qsgd::gpu
