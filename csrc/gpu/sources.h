// Where an encoder has its elements from, with what earlier codes have lost of them.
#pragma once

#include "gpu/pieces.h"
#include "gpu/tile.h"
#include "gpu/values.h"

namespace qsgd::gpu {

__device__ __forceinline__ float* floats(uint64_t address) {
  return reinterpret_cast<float*>(address);
}

// Adds what an earlier code has lost of a lane's elements.
__device__ __forceinline__ void add_residual(uint64_t residual, const Piece& piece, size_t at,
                                             int j, float* value) {
  if (residual == 0) return;
  float left[kMine];
  Array<float>::of(floats(residual), piece.count).load(at, j, left);
#pragma unroll
  for (int i = 0; i < kMine; ++i) value[i] += left[i];
}

// Keeps what this code has lost. What is not finite would never leave again.
__device__ __forceinline__ void set_residual(uint64_t residual, const Piece& piece, size_t at,
                                             int j, const float* left) {
  if (residual == 0) return;
  float kept[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    kept[i] = is_finite(left[i]) ? left[i] : 0.0f;
  }
  Array<float>::of(floats(residual), piece.count).store(at, j, kept);
}

// Where an encoder has its elements from, and how many blocks of it a multiprocessor should hold so
// that some compute while others wait: an array,
template <class Real>
struct FromArray {
  static constexpr int kBlocks = 8;
  Real* data;

  __device__ __forceinline__ Array<Real> array(const Piece& piece) const {
    return Array<Real>::of(data + piece.at, piece.count);
  }
  __device__ __forceinline__ void load(const Bucket& bucket, size_t at, int j, float* value) const {
    const Piece& piece = bucket.piece;
    array(piece).load(at, j, value);
    add_residual(piece.residual, piece, at, j, value);
  }
  __device__ __forceinline__ bool keeps(const Piece& piece) const { return piece.residual != 0; }
  __device__ __forceinline__ void keep(const Piece& piece, size_t at, int j,
                                       const float* left) const {
    set_residual(piece.residual, piece, at, j, left);
  }
};

// or the sum over ranks of what they have coded, and of an array.
template <class Real>
struct FromSum {
  static constexpr int kBlocks = 6;
  FromArray<Real> input;
  Addends addends;
  Code code;

  __device__ __forceinline__ void load(const Bucket& bucket, size_t at, int j, float* value) const {
    const Piece& piece = bucket.piece;
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] = 0;
#pragma unroll 1
    for (int rank = 0; rank < addends.ranks; ++rank) {
      if (rank == addends.own) {
        float mine[kMine];
        input.load(bucket, at, j, mine);
#pragma unroll
        for (int i = 0; i < kMine; ++i) value[i] += mine[i];
      } else {
        each_value(addends.messages + addends.stride * static_cast<size_t>(rank), bucket, code,
                   at / kTile, j, [&](int i, float x) { value[i] += x; });
      }
    }
    finish(piece, at, j, value);
  }
  // What is done with the sum of a lane's elements.
  __device__ __forceinline__ void finish(const Piece& piece, size_t at, int j, float* value) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] *= addends.factor;
    if (at + kTile > piece.count) {
      // What a message has behind the piece's end is padding, and need not be the code of zero.
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
        if (at + 16 * (i / 4) + 4 * j + i % 4 >= piece.count) value[i] = 0;
      }
    }
    add_residual(piece.owner_residual, piece, at, j, value);
  }
  __device__ __forceinline__ bool keeps(const Piece& piece) const {
    return piece.residual != 0 || piece.owner_residual != 0;
  }
  __device__ __forceinline__ void keep(const Piece& piece, size_t at, int j,
                                       const float* left) const {
    const float sent[kMine] = {};  // this rank's own addend was added as it was
    set_residual(piece.residual, piece, at, j, sent);
    set_residual(piece.owner_residual, piece, at, j, left);
  }
};

}  // namespace qsgd::gpu
