// What every kernel finds out first: the code, and which bucket is whose.
#pragma once

#include "gpu/codec.h"
#include "gpu/runtime.h"

namespace qsgd::gpu {

constexpr float kMost = 0x1.fffffep127f;

__device__ __forceinline__ bool is_finite(float x) {
  return (__float_as_uint(x) & 0x7fffffffu) < kInfinity;
}

// What the kernels need to know of a code.
struct Code {
  explicit Code(const CodecSpec& spec)
      : bucket(spec.bucket),
        bits(spec.bits),
        levels(spec.levels()),
        l2(spec.norm == Norm::kL2),
        nearest(spec.rounding == Rounding::kNearest),
        contract(spec.contract && !nearest) {}
  uint32_t bucket;
  int bits;
  int levels;
  bool l2;
  bool nearest;
  bool contract;
};

// A bucket of the piece with this number: the `index`-th, of the piece's elements from `begin` to
// `end`.
struct Bucket {
  Piece piece;
  uint32_t number;
  size_t index;
  size_t begin, end;
};

// The bucket with this number among those of all pieces; an empty one behind the last.
__device__ __forceinline__ Bucket find(const Pieces& pieces, size_t number, uint32_t size) {
  Bucket found{pieces.only, 0, 0, 0, 0};
  if (number >= pieces.buckets) return found;
  if (pieces.list != nullptr) {
    uint32_t low = 0, high = pieces.size;  // it is in one of [low, high)
    while (high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      (pieces.list[middle].first_bucket <= number ? low : high) = middle;
    }
    found.piece = pieces.list[low];
    found.number = low;
  }
  found.index = number - found.piece.first_bucket;
  found.begin = found.index * size;
  found.end = found.begin + size < found.piece.count ? found.begin + size : found.piece.count;
  return found;
}

}  // namespace qsgd::gpu
