// Decoding of values, with the bits of the CPU's results.
#pragma once

#include <cmath>

#include "gpu/pieces.h"
#include "gpu/tile.h"

namespace qsgd::gpu {

constexpr float kSmall = 0x1p-126f * 256;  // a level of it is normal

// Value of a level where float32 is imprecise or overflows. Rarely needed: not inlined, so that it
// takes no registers from the usual case.
inline __device__ __noinline__ float extreme_value(float level, float norm, int levels) {
  return static_cast<float>(static_cast<double>(level) * static_cast<double>(norm) / levels);
}

// Decoder: unit times level, but in float64 where float32 is imprecise or overflows.
class Values {
 public:
  // Divides the norm by a product and a correction: rounded like a division (Markstein), with a
  // third of the work.
  __device__ __forceinline__ Values(float norm, const Code& code)
      : norm_(norm),
        levels_(code.levels),
        extreme_((norm < kSmall && norm != 0) || norm > kMost / 2) {
    const float product = norm * code.inverse;
    const float off = fmaf(-product, static_cast<float>(code.levels), norm);
    unit_ = fmaf(off, code.inverse, product);
  }

  // Calls use(i, value) for each of a lane's 16 codes.
  template <class Use>
  __device__ __forceinline__ void each(const uint32_t* word, const Use& use) const {
    if (extreme_) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) use(i, extreme_value(level(word, i), norm_, levels_));
    } else {
#pragma unroll
      for (int i = 0; i < kMine; ++i) use(i, level(word, i) * unit_);
    }
  }

 private:
  // The code's byte becomes the last byte of 2^23 + code, from which the offset is subtracted:
  // exact, and cheaper than a shift, a mask and a conversion.
  __device__ __forceinline__ float level(const uint32_t* word, int i) const {
    constexpr uint32_t kOfFloat = 0x4b000000u;  // 2^23
    const uint32_t bits = __byte_perm(word[i / 4], kOfFloat, 0x7650u + i % 4);
    return __uint_as_float(bits) - (0x1p23f + static_cast<float>(levels_));
  }

  float norm_, unit_;
  int levels_;
  bool extreme_;
};

// Positions of a bucket's scale, and of a lane's codes of a tile, in a message.
__device__ __forceinline__ size_t scale_at(const Bucket& bucket) {
  return bucket.piece.scales_at + size_t{bucket.index} * sizeof(float);
}
__device__ __forceinline__ size_t codes_at(const Piece& piece, const Code& code, const Part& part) {
  return piece.codes_at + size_t{part.tile()} * static_cast<uint32_t>(8 * code.bits);
}

__device__ __forceinline__ float scale_of(const uint8_t* message, const Bucket& bucket) {
  return *reinterpret_cast<const float*>(message + scale_at(bucket));
}

// A message's data for a lane's elements, loaded before they are used.
struct Coded {
  __device__ __forceinline__ Coded(const uint8_t* scale, const uint8_t* codes, const Code& code,
                                   uint32_t j)
      : scale(*reinterpret_cast<const float*>(scale)) {
    unpack(reinterpret_cast<const uint32_t*>(codes), code.bits, j, word);
  }
  float scale;
  uint32_t word[4];
};

// Calls use(i, value) for the lane's 16 elements of a tile of a bucket.
template <class Use>
__device__ __forceinline__ void each_value(const uint8_t* message, const Bucket& bucket,
                                           const Code& code, const Part& part, const Use& use) {
  const Coded coded(message + scale_at(bucket), message + codes_at(bucket.piece, code, part), code,
                    part.j);
  Values(coded.scale, code).each(coded.word, use);
}

}  // namespace qsgd::gpu
