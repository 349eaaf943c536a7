// Philox4x32 with 7 rounds, which pass BigCrush according to the paper cited in noise.h:
// multiplications and no tables, and therefore the generator shared by CPUs and GPUs.
#pragma once

#include <cstdint>

#include "quant/noise.h"

namespace qsgd {

constexpr int kPhiloxRounds = 7;

// Computes four words from a counter of four and a key of two.
struct PhiloxBlock {
  uint32_t word[4];
};

// Compilers for GPUs also extend the words between two products to 64 bits, which takes a third
// more instructions.
QSGD_INLINE uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

QSGD_INLINE PhiloxBlock philox(PhiloxBlock x, uint32_t key0, uint32_t key1, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = wide_product(x.word[0], 0xD2511F53u);
    const uint64_t b = wide_product(x.word[2], 0xCD9E8D57u);
    x = {{static_cast<uint32_t>(b >> 32) ^ x.word[1] ^ key0, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ x.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return x;
}

// The finaliser of SplitMix64, a bijection of 64 bits (Steele et al., Fast splittable pseudorandom
// number generators, OOPSLA'14).
inline uint64_t split_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The noise of a NoiseKey. Philox's key of 64 bits is too small for seed and tensor, so it is a
// hash of both, by SplitMix64.
struct Philox {
  QSGD_INLINE Philox(uint64_t mixed, uint64_t high) : mixed(mixed), high(high) {}
  explicit Philox(const NoiseKey& key)
      : mixed(mix(key.seed, key.tensor)), high(counter_high(key)) {}

  static uint64_t mix(uint64_t seed, uint32_t tensor) {
    return split_mix(seed + 0x9E3779B97F4A7C15u * (uint64_t{tensor} + 1));
  }

  QSGD_INLINE PhiloxBlock block(uint64_t number) const {
    const PhiloxBlock counter = {{static_cast<uint32_t>(number),
                                  static_cast<uint32_t>(number >> 32), static_cast<uint32_t>(high),
                                  static_cast<uint32_t>(high >> 32)}};
    return philox(counter, static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32),
                  kPhiloxRounds);
  }

  uint64_t mixed;
  uint64_t high;
};

}  // namespace qsgd
