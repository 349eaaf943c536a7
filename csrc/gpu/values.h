// What codes are worth, bit by bit as on the CPU.
#pragma once

#include "gpu/pieces.h"
#include "gpu/tile.h"

namespace qsgd::gpu {

constexpr float kSmall = 0x1p-126f * 256;  // a level of it is normal

// What a level is worth where float32 is coarse or ends. Seldom needed, so that it must not take
// registers from what is.
inline __device__ __noinline__ float extreme_value(float level, float norm, int levels) {
  return static_cast<float>(static_cast<double>(level) * static_cast<double>(norm) / levels);
}

// What codes are worth: unit times level, but in float64 where float32 is coarse or ends.
class Values {
 public:
  __device__ __forceinline__ Values(float norm, int levels)
      : norm_(norm),
        unit_(norm / static_cast<float>(levels)),
        levels_(levels),
        extreme_((norm < kSmall && norm != 0) || norm > kMost / 2) {}

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
  // The code's byte becomes the last one of 2^23 + code, from which the rest is taken: exact, and
  // less work than a shift, a mask and a conversion.
  __device__ __forceinline__ float level(const uint32_t* word, int i) const {
    constexpr uint32_t kOfFloat = 0x4b000000u;  // 2^23
    const uint32_t bits = __byte_perm(word[i / 4], kOfFloat, 0x7650u + i % 4);
    return __uint_as_float(bits) - (0x1p23f + static_cast<float>(levels_));
  }

  float norm_, unit_;
  int levels_;
  bool extreme_;
};

__device__ __forceinline__ float scale_of(const uint8_t* message, const Bucket& bucket) {
  return reinterpret_cast<const float*>(message + bucket.piece.scales_at)[bucket.index];
}

// Calls use(i, value) for the lane's 16 elements of a tile of a bucket.
template <class Use>
__device__ __forceinline__ void each_value(const uint8_t* message, const Bucket& bucket,
                                           const Code& code, size_t tile, int j, const Use& use) {
  const auto* const codes = reinterpret_cast<const uint32_t*>(message + bucket.piece.codes_at);
  uint32_t word[4];
  unpack(codes + tile * (2 * code.bits), code.bits, j, word);
  Values(scale_of(message, bucket), code.levels).each(word, use);
}

}  // namespace qsgd::gpu
