// How far codes are from what they were made of.
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

// A lane's part of a bucket, which a warp has for itself; all lanes come here.
template <class Real, bool kRotated>
__device__ __forceinline__ Judged judge_lane(const FromArray<Real>& x, const Decoding& from,
                                             const Bucket& bucket, int lane, const Levels& levels) {
  const Piece& piece = bucket.piece;
  const bool kept = piece.residual != 0;
  Judged all{};
  for (size_t span = bucket.begin; span < bucket.end; span += kSpan) {
    const size_t at = span + lane / kTileLanes * kTile;
    const int j = lane % kTileLanes;
    float sent[kMine];
    if constexpr (kRotated) {
      const Place place(bucket, from.code.bucket, lane);
      read_rotated(from.message, from.code, place, levels, sent);
    }
    if (at >= bucket.end) continue;
    if constexpr (!kRotated) {
      each_value(from.message, bucket, from.code, at / kTile, j,
                 [&](int i, float value) { sent[i] = value; });
    }
    float given[kMine];
    if (kept) {
      Array<float>::of(floats(piece.residual), piece.count).load(at, j, given);
    } else {
      x.array(piece).load(at, j, given);
    }
    for (int i = 0; i < kMine; ++i) {
      if (at + 16 * (i / 4) + 4 * j + i % 4 >= bucket.end) continue;
      const double mine = given[i], code = sent[i];
      const double error = kept ? mine : mine - code, value = kept ? mine + code : mine;
      all.error += error * error;
      all.energy += value * value;
    }
  }
  return all;
}

// A warp takes those that are judged of `every` buckets, which may be of several pieces.
template <class Real, bool kRotated>
__global__ void __launch_bounds__(kWarps* kLanes)
    judge_buckets(const FromArray<Real> x, const Decoding from, uint32_t every, Judged* sums) {
  __shared__ Levels levels;
  if constexpr (kRotated) levels.fill(from.code.bits);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const size_t begin = (size_t{blockIdx.x} * blockDim.x + threadIdx.x) / kLanes * every;
  const size_t buckets = from.pieces.buckets, of = from.code.bucket;
  const size_t end = begin + every < buckets ? begin + every : buckets;
  for (size_t number = begin; number < end;) {
    const Bucket bucket = find(from.pieces, number, from.code.bucket);
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
