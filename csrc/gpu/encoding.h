// Arguments of an encoder and a decoder besides the elements.
#pragma once

#include "gpu/pieces.h"
#include "gpu/tile.h"
#include "gpu/values.h"

namespace qsgd::gpu {

constexpr int kWarps = 4;  // of a thread block whose warps have different buckets

struct Encoding {
  Pieces pieces;
  Code code;
  Draw draw;
  uint8_t* message;
  uint32_t* nonfinite;

  __device__ __forceinline__ Philox philox(const Piece& piece) const {
    const uint32_t step = draw.step + (draw.later == nullptr ? 0 : *draw.later);
    return {piece.tensor, uint64_t{draw.who} << 32 | step};
  }
  // Number of the tile in the tensor, which keys the noise.
  __device__ __forceinline__ uint64_t tile(const Piece& piece, const Part& part) const {
    return piece.first / kTile + part.tile();
  }
  __device__ __forceinline__ uint32_t* codes(const Piece& piece, const Part& part) const {
    return reinterpret_cast<uint32_t*>(message + codes_at(piece, code, part));
  }
  __device__ __forceinline__ void report(const Bucket& bucket, float scale) const {
    float* const scales = reinterpret_cast<float*>(message + bucket.piece.scales_at);
    scales[bucket.index] = scale;
    if (nonfinite != nullptr && scale != scale) atomicOr(nonfinite, 1u);
  }
};

struct Decoding {
  static constexpr int kBlocks = 8;  // of kWarps each, as in sources.h
  Pieces pieces;
  Code code;
  const uint8_t* message;
  uint32_t* nonfinite;

  __device__ __forceinline__ void load(const Bucket& bucket, const Part& part, float* value) const {
    each_value(message, bucket, code, part, [&](int i, float x) { value[i] = x; });
  }
  __device__ __forceinline__ void report(const Bucket& bucket) const {
    if (nonfinite == nullptr || bucket.size == 0) return;
    const auto* const scales = reinterpret_cast<const float*>(message + bucket.piece.scales_at);
    if (!is_finite(scales[bucket.index])) atomicOr(nonfinite, 1u);
  }
};

}  // namespace qsgd::gpu
