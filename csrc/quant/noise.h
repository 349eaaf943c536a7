// Rounding noise that depends on nothing but its key: not on order, threads or instruction set.
// Philox4x32 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC'11.
#pragma once

#include <cstdint>

#include "common/clones.h"

namespace qsgd {

constexpr int kTile = 64;   // elements that are coded together
constexpr int kLanes = 8;   // Philox blocks per tile, of 4 words with 2 noises each
constexpr int kRounds = 7;  // enough to pass BigCrush, by the paper

enum class Phase : uint32_t { kScatter = 1, kGather = 2 };

// Who draws, for what, when. Ranks must differ: shared noise does not average out.
struct NoiseKey {
  uint64_t seed;
  uint32_t tensor;
  uint32_t step;
  uint32_t rank;  // below 2^28
  Phase phase;
};

struct PhiloxLanes {
  uint32_t word[4][kLanes];
};

// Philox on kLanes counters at once; the lanes' counters differ in word 0 only.
// The products of all lanes with a constant, as low and high words. Loops of their own, not
// unrolled: that form the compiler turns into vector multiplications.
QSGD_INLINE void multiply(const uint32_t* x, uint32_t by, uint32_t* low, uint32_t* high) {
#pragma GCC unroll 1
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t product = uint64_t{by} * x[lane];
    low[lane] = static_cast<uint32_t>(product);
    high[lane] = static_cast<uint32_t>(product >> 32);
  }
}

template <int Rounds>
QSGD_INLINE void philox(PhiloxLanes& c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < Rounds; ++round) {
    uint32_t low0[kLanes], high0[kLanes], low1[kLanes], high1[kLanes];
    multiply(c.word[0], 0xD2511F53u, low0, high0);
    multiply(c.word[2], 0xCD9E8D57u, low1, high1);
#pragma GCC unroll 1
    for (int lane = 0; lane < kLanes; ++lane) {
      c.word[0][lane] = high1[lane] ^ c.word[1][lane] ^ key0;
      c.word[2][lane] = high0[lane] ^ c.word[3][lane] ^ key1;
      c.word[1][lane] = low1[lane];
      c.word[3][lane] = low0[lane];
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// 16 uniform bits for each of the 64 elements of tile `tile` of the key's tensor.
// Element 16 w + 8 h + l takes half h of word w of lane l.
QSGD_INLINE void tile_noise(const NoiseKey& key, uint64_t tile, uint16_t* noise) {
  PhiloxLanes c;
  for (int lane = 0; lane < kLanes; ++lane) {
    c.word[0][lane] = static_cast<uint32_t>(tile * kLanes) + static_cast<uint32_t>(lane);
    c.word[1][lane] = key.tensor;
    c.word[2][lane] = key.step;
    c.word[3][lane] = (key.rank << 4) | static_cast<uint32_t>(key.phase);
  }
  philox<kRounds>(c, static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32));
  for (int w = 0; w < 4; ++w) {
    for (int lane = 0; lane < kLanes; ++lane) {
      noise[16 * w + lane] = static_cast<uint16_t>(c.word[w][lane]);
      noise[16 * w + 8 + lane] = static_cast<uint16_t>(c.word[w][lane] >> 16);
    }
  }
}

}  // namespace qsgd
