// Kernels for EDEN (quant/eden.cc) with buckets of up to a span, in addition to QSGD's. The
// arithmetic equals the CPU's, so the bytes are the same.
#pragma once

#include <cmath>

#include "gpu/encoding.h"
#include "gpu/quantize.h"
#include "gpu/rotation.h"
#include "gpu/sources.h"

namespace qsgd::gpu {

constexpr uint32_t kMostLevels = 128;

// The levels of a code with `bits` bits, shared by the threads of a block.
struct Levels {
  float value[kMostLevels];
  // As EdenTable's (quant/kernels.h).
  float edge[kEdenCells];
  float last_edge;

  __device__ __forceinline__ void fill(int bits) {
    static_assert(kWarps * kLanes >= kMostLevels);
    const uint32_t i = threadIdx.x, levels = 1u << (bits - 1);
    if (i < levels) {
      value[i] = lloyd_max(bits)[i];
      const float more =
          eden_set_cells(bits, i, [&](uint32_t cell, float of_cell) { edge[cell] = of_cell; });
      if (i + 2 == levels) last_edge = more;
    }
    __syncthreads();
  }
  // Counts the edges below each of a lane's magnitudes.
  __device__ __forceinline__ void find(const float* value, int bits, uint32_t* level) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const float magnitude = fabsf(value[i]);
      const float near = edge[eden_cell(bits, magnitude)];
      level[i] = (__float_as_uint(near) & 0xffu) + (magnitude > near ? 1 : 0);
    }
    if (bits < 8) return;
#pragma unroll
    for (int i = 0; i < kMine; ++i) level[i] += fabsf(value[i]) > last_edge ? 1 : 0;
  }
};

// A lane's position in an EDEN bucket, which has 2^shift lanes.
struct Place {
  __device__ __forceinline__ Place(const Pieces& pieces, uint32_t of, int shift)
      : Place(gpu::find(pieces, number_of_lane() >> shift, of), of,
              threadIdx.x & ((1u << shift) - 1)) {}
  __device__ __forceinline__ Place(const Bucket& bucket, uint32_t of, uint32_t lane)
      : lane(lane),
        bucket(bucket),
        part(bucket, lane / kTileLanes * kTile, lane % kTileLanes),
        size(bucket.size == 0 ? 0 : eden_size(bucket.size)),
        mine(lane * kMine < size),
        rotation(of, size, lane) {}
  uint32_t lane;
  Bucket bucket;
  Part part;  // may be empty for lanes without codes
  uint32_t size;
  bool mine;
  Rotation rotation;
};

// Decodes a bucket; the lane has byte c of word[p].
__device__ __forceinline__ void rotate_back(const uint32_t* word, float scale, int bits,
                                            const Place& place, const Levels& levels,
                                            float* value) {
  const uint32_t below = (1u << (bits - 1)) - 1;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const uint32_t code = (word[i / 4] >> (8 * (i % 4))) & 0xffu;
    const uint32_t sign = (code >> (bits - 1)) << 31;
    value[i] = __uint_as_float(__float_as_uint(levels.value[code & below]) ^ sign);
  }
  const uint32_t seed = eden_seed_in(scale);
  place.rotation.rise(value);
  place.rotation.flip_inner(value, seed);
  place.rotation.fall(value);
  place.rotation.flip_outer(value, seed);
  const float unit = scale / static_cast<float>(place.size);
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    float x = scale == 0 ? 0 : value[i] * unit;
    if (x > kMost) x = kMost;  // NaN is kept
    if (x < -kMost) x = -kMost;
    value[i] = x;
  }
}

// Decodes a message at this place. All lanes of a bucket need its scale, because they exchange
// values in the rotations.
__device__ __forceinline__ void read_rotated(const uint8_t* message, const Code& code,
                                             const Place& place, const Levels& levels,
                                             float* value) {
  uint32_t word[4] = {};
  const float scale = place.size == 0 ? 0 : scale_of(message, place.bucket);
  if (place.mine) {
    const uint8_t* const codes = message + codes_at(place.bucket.piece, code, place.part);
    unpack(reinterpret_cast<const uint32_t*>(codes), code.bits, place.part.j, word);
  }
  rotate_back(word, scale, code.bits, place, levels, value);
}

// Sources of elements, as in sources.h; all lanes of a warp must call load().
template <class Real>
struct RotatedArray : FromArray<Real> {
  __device__ __forceinline__ void load(const Place& place, const Levels& /*levels*/,
                                       float* value) const {
    FromArray<Real>::load(place.bucket, place.part, value);
  }
};

struct RotatedDecoding : Decoding {
  __device__ __forceinline__ void load(const Place& place, const Levels& levels,
                                       float* value) const {
    read_rotated(message, code, place, levels, value);
  }
};

template <class Real>
struct RotatedSum : FromSum<Real> {
  __device__ __forceinline__ void load(const Place& place, const Levels& levels,
                                       float* value) const {
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] = 0;
#pragma unroll 1
    for (int rank = 0; rank < this->addends.ranks; ++rank) {
      float addend[kMine];
      if (rank == this->addends.own) {
        this->input.load(place.bucket, place.part, addend);
      } else {
        const uint8_t* const message =
            this->addends.messages + this->addends.stride * static_cast<uint32_t>(rank);
        read_rotated(message, this->code, place, levels, addend);
      }
#pragma unroll
      for (int i = 0; i < kMine; ++i) value[i] += addend[i];
    }
    if (place.mine) {
      this->finish(place.bucket.piece, place.part, value);
      return;
    }
    // Lanes beyond a short bucket have read no codes, but took part in the rotation.
#pragma unroll
    for (int i = 0; i < kMine; ++i) value[i] = 0;
  }
};

// Sets `word` to the codes of a lane's elements and returns the bucket's scale. `lanes` lanes have
// the bucket.
__device__ __forceinline__ float code_rotated(const float* value, const Place& place, int lanes,
                                              uint32_t seed, int bits, const Levels& levels,
                                              uint32_t* word) {
  float y[kMine], term[kMine];
  const auto set = [&](float lift) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      y[i] = value[i] * lift;
      term[i] = y[i] * y[i];
    }
    return place.rotation.sum(term);
  };
  float lift = 1, energy = set(1);
  const bool unfit = !(energy >= kEdenFaint && energy <= kEdenStrong);
  uint32_t most = 1;
  if (max_of_lanes(unfit ? 1 : 0, kLanes) != 0) {
    const uint32_t largest = max_of_lanes(largest_magnitude(value), lanes);
    if (unfit) {
      most = largest;
      lift = eden_lift(most);
    }
    energy = set(lift);
  }
  place.rotation.flip_outer(y, seed);
  place.rotation.rise(y);
  place.rotation.flip_inner(y, seed);
  place.rotation.fall(y);
  const float d = static_cast<float>(place.size), grow = eden_grow(bits);
  const float scale = grow * sqrtf(d / energy) / d;
#pragma unroll
  for (int i = 0; i < kMine; ++i) y[i] *= scale;
  uint32_t level[kMine];
  levels.find(y, bits, level);
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    word[p] = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int i = 4 * p + c;
      term[i] = fabsf(y[i]) * levels.value[level[i]];
      const uint32_t sign = (__float_as_uint(y[i]) >> 31) << (bits - 1);
      word[p] |= (level[i] | sign) << (8 * c);
    }
  }
  const float match = place.rotation.sum(term);
  const float u = grow * sqrtf(d * energy) / match / lift;
  if (most != 0 && most < kInfinity && u >= kEdenLeast) return eden_with_seed(u, seed);
#pragma unroll
  for (int p = 0; p < 4; ++p) word[p] = 0;
  return most < kInfinity ? 0 : __uint_as_float(0x7fc00000u);
}

// 2^shift lanes per bucket.
template <class Source>
__global__ void __launch_bounds__(kWarps* kLanes)
    encode_rotated(const Source source, const Encoding to, int shift) {
  __shared__ Levels levels;
  const Code& code = to.code;
  levels.fill(code.bits);
  const Place place(to.pieces, code.bucket, shift);
  const Bucket& bucket = place.bucket;
  float value[kMine];
  source.load(place, levels, value);
  const uint32_t seed = eden_seed(to.philox(bucket.piece), bucket.piece.first + bucket.begin);
  uint32_t word[4];
  const float scale = code_rotated(value, place, 1 << shift, seed, code.bits, levels, word);
  pack(word, code.bits, place.part.j, to.codes(bucket.piece, place.part), place.mine);
  if (place.mine && place.lane == 0) to.report(bucket, scale);
  const bool keeps = place.mine && source.keeps(bucket.piece);
  if (max_of_lanes(keeps ? 1 : 0, kLanes) == 0) return;
  float sent[kMine];
  rotate_back(word, scale, code.bits, place, levels, sent);
#pragma unroll
  for (int i = 0; i < kMine; ++i) value[i] -= sent[i];
  if (keeps) source.keep(bucket.piece, place.part, value);
}

template <class Real, class Source>
__global__ void __launch_bounds__(kWarps* kLanes)
    decode_rotated(Real* out, const Source from, int shift) {
  __shared__ Levels levels;
  levels.fill(from.code.bits);
  const Place place(from.pieces, from.code.bucket, shift);
  float value[kMine];
  from.load(place, levels, value);
  if (place.mine) Mine<Real>(out + place.bucket.piece.at, place.part).store(value);
  if (place.lane == 0) from.report(place.bucket);
}

}  // namespace qsgd::gpu
