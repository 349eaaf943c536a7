// Rounding noise that depends only on its key: not on order, threads or instruction set.
//
// The generators are from Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC'11. A tile
// uses the 8 blocks of 128 bits from 8 * tile on, an element 16 bits of one of them.
//
// ARS-5, for CPUs with AES instructions: five AES rounds on a counter, with round keys from a Weyl
// sequence. The key is (seed, tensor), the counter (block, step, rank and phase). Element 32 z + 16
// h + l of a tile uses half h of the 32-bit word l % 4 of block 4 z + l / 4.
//
// Philox4x32-7, for GPUs: philox.h. Element 32 z + 16 h + 4 j + c uses half h of word c of block 2
// j + z, so that four consecutive elements need half a block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/clones.h"

namespace qsgd {

constexpr int kTile = 64;       // elements coded together
constexpr int kTileBlocks = 8;  // of 128 bits: 16 bits per element
constexpr int kArsRounds = 5;   // passes BigCrush, according to the paper

enum class Generator : uint32_t { kArs, kPhilox };

enum class Phase : uint32_t { kScatter = 1, kGather = 2 };

// Identifies the noise. Ranks must differ: shared noise does not average out.
struct NoiseKey {
  uint64_t seed;
  uint32_t tensor;
  uint32_t step;
  uint32_t rank;  // below 2^28
  Phase phase;
  Generator generator = Generator::kArs;
};

// The upper half of the counters of a key; the lower half is the number of the block.
QSGD_INLINE uint64_t counter_high(const NoiseKey& key) {
  const uint32_t who = (key.rank << 4) | static_cast<uint32_t>(key.phase);
  return uint64_t{who} << 32 | key.step;
}

// Writes 16 uniform bits per element, for kTile * tiles elements from tile `first_tile` on.
void noise(const NoiseKey& key, uint64_t first_tile, size_t tiles, uint16_t* out);

}  // namespace qsgd
