// Common prologue of the kernels: the code, and the bucket of a lane.
#pragma once

#include "gpu/codec.h"
#include "gpu/runtime.h"

namespace qsgd::gpu {

constexpr float kMost = 0x1.fffffep127f;

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) < kInfinity;
}

// Global number of the lane in a launch.
__device__ __forceinline__ size_t number_of_lane() {
  return size_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

// Properties of a code that the kernels need.
struct Code {
  explicit Code(const CodecSpec& spec)
      : bucket(spec.bucket),
        bits(spec.bits),
        levels(spec.levels()),
        inverse(1 / static_cast<float>(levels)),
        l2(spec.norm == Norm::kL2),
        nearest(spec.rounding == Rounding::kNearest),
        contract(spec.contract && !nearest) {}
  uint32_t bucket;
  int bits;
  int levels;
  float inverse;  // 1 / levels
  bool l2;
  bool nearest;
  bool contract;
};

// A bucket of piece `number`: the `index`-th of the piece, with `size` elements from `begin`.
struct Bucket {
  Piece piece;
  uint32_t number;
  uint32_t index;
  uint32_t size;
  size_t begin;
};

// Returns the bucket with this number among those of all pieces; beyond the last, the last one with
// size 0.
__device__ __forceinline__ Bucket find(const Pieces& pieces, uint32_t number, uint32_t size) {
  Bucket found;
  const auto buckets = static_cast<uint32_t>(pieces.buckets);
  const bool there = number < buckets;
  if (!there) number = buckets - 1;
  found.number = 0;
  if (pieces.list != nullptr) {
    uint32_t low = 0, high = pieces.size;  // the piece is one of [low, high)
    while (high - low > 1) {
      const uint32_t middle = (low + high) / 2;
      (pieces.list[middle].first_bucket <= number ? low : high) = middle;
    }
    found.piece = pieces.list[low];
    found.number = low;
  } else {
    found.piece = pieces.only;
  }
  found.index = number - static_cast<uint32_t>(found.piece.first_bucket);
  found.begin = size_t{found.index} * size;
  const uint64_t left = found.piece.count - found.begin;
  found.size = left < size ? static_cast<uint32_t>(left) : size;
  if (!there) found.size = 0;
  return found;
}

// A lane's part of a tile, laid out as in tile.h: lane j of the four lanes of the tile that begins
// with element `at` of the piece. `left`: elements from there on; 64 or more: a full tile.
struct Part {
  __device__ __forceinline__ Part(const Bucket& bucket, uint32_t in, uint32_t j)
      : at(bucket.begin + in), left(in < bucket.size ? bucket.size - in : 0), j(j) {}
  __device__ __forceinline__ bool empty() const { return left == 0; }
  __device__ __forceinline__ uint32_t tile() const { return static_cast<uint32_t>(at / kTile); }
  // Whether the lane's i-th element exists.
  __device__ __forceinline__ bool has(uint32_t i) const {
    return 16 * (i / 4) + 4 * j + i % 4 < left;
  }
  size_t at;
  uint32_t left, j;
};

}  // namespace qsgd::gpu
