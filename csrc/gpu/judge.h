// Measurement of coding errors.
#pragma once

#include "gpu/eden.h"
#include "gpu/encoding.h"
#include "gpu/sources.h"
#include "gpu/values.h"

namespace qsgd::gpu {

__device__ __forceinline__ double sum_of_lanes(double sum) {
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += lane_xor(sum, mask);
  return sum;
}

// A lane's part of a bucket that belongs to one warp; all lanes must call this.
template <class Real, bool kRotated>
__device__ __forceinline__ Judged judge_lane(const FromArray<Real>& x, const Decoding& from,
                                             const Bucket& bucket, uint32_t lane,
                                             const Levels& levels) {
  const Piece& piece = bucket.piece;
  const bool kept = piece.residual != 0;
  Judged all{};
  for (uint32_t span = 0; span < bucket.size; span += kSpan) {
    const Part part(bucket, span + lane / kTileLanes * kTile, lane % kTileLanes);
    float sent[kMine];
    if constexpr (kRotated) {
      const Place place(bucket, from.code.bucket, lane);
      read_rotated(from.message, from.code, place, levels, sent);
    }
    if (part.empty()) continue;
    if constexpr (!kRotated) {
      each_value(from.message, bucket, from.code, part,
                 [&](int i, float value) { sent[i] = value; });
    }
    float given[kMine];
    if (kept) {
      Mine<float>(floats(piece.residual), part).load(given);
    } else {
      x.mine(piece, part).load(given);
    }
    for (int i = 0; i < kMine; ++i) {
      if (!part.has(i)) continue;
      const double mine = given[i], code = sent[i];
      const double error = kept ? mine : mine - code, value = kept ? mine + code : mine;
      all.error += error * error;
      all.energy += value * value;
    }
  }
  return all;
}

// A warp handles the sampled ones among `every` buckets, which may belong to several pieces.
template <class Real, bool kRotated>
__global__ void __launch_bounds__(kWarps* kLanes)
    judge_buckets(const FromArray<Real> x, const Decoding from, uint32_t every, Judged* sums) {
  __shared__ Levels levels;
  if constexpr (kRotated) levels.fill(from.code.bits);
  const uint32_t lane = threadIdx.x % kLanes;
  const size_t begin = size_t{number_of_lane() / kLanes} * every;
  const size_t buckets = from.pieces.buckets, of = from.code.bucket;
  const size_t end = begin + every < buckets ? begin + every : buckets;
  for (size_t number = begin; number < end;) {
    const Bucket bucket = find(from.pieces, static_cast<uint32_t>(number), from.code.bucket);
    const size_t behind = bucket.index % every;
    if (behind == 0 && is_finite(scale_of(from.message, bucket))) {
      const Judged mine = judge_lane<Real, kRotated>(x, from, bucket, lane, levels);
      const double error = sum_of_lanes(mine.error), energy = sum_of_lanes(mine.energy);
      if (lane == 0) {
        atomicAdd(&sums[bucket.number].error, error);
        atomicAdd(&sums[bucket.number].energy, energy);
      }
    }
    const size_t next_piece = bucket.piece.first_bucket + (bucket.piece.count + of - 1) / of;
    number += every - behind;
    if (number > next_piece) number = next_piece;
  }
}

}  // namespace qsgd::gpu
