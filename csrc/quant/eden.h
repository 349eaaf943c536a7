// Definition of EDEN (eden.cc) shared by CPU and GPU.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "common/clones.h"
#include "common/dtype.h"
#include "quant/lloyd_max.h"
#include "quant/noise.h"

namespace qsgd {

constexpr uint32_t kEdenSeeds = 1u << 15;  // below the scale's other bits
constexpr float kEdenLeast = 0x1p-110f;    // of scales: over a bucket's size, still normal
constexpr float kEdenMost = 0x1p100f;      // of scales: beyond, values could overflow
// Range of |x|^2 in which squares of elements neither underflow nor overflow float32.
constexpr float kEdenFaint = 0x1p-100f;
constexpr float kEdenStrong = 0x1p100f;

// Number of elements rotated together: a last short bucket is padded with zeros.
QSGD_INLINE uint32_t eden_size(size_t count) {
  uint32_t size = kTile;
  while (size < count) size *= 2;
  return size;
}

constexpr int kEdenCells = 256;                // at most
constexpr uint32_t kEdenNoEdge = 0x7f000000u;  // above all magnitudes
// Number of distinct cells.
QSGD_INLINE constexpr int eden_cells(int bits) { return bits < 4 ? 1 << (bits - 1) : 1 << bits; }
// Cells per standard deviation; magnitudes are compared in cells.
QSGD_INLINE constexpr float eden_grow(int bits) { return static_cast<float>(1 << bits) / 4; }

// The smallest magnitude above a level, in cells; its last byte is the level's number.
QSGD_TABLE inline __attribute__((always_inline)) float eden_edge(int bits, uint32_t level) {
  if (level + 1 == 1u << (bits - 1)) return bit_cast<float>(kEdenNoEdge | level);
  const float* const value = lloyd_max(bits);
  const float middle = (value[level] + value[level + 1]) / 2 * eden_grow(bits);
  return bit_cast<float>((bit_cast<uint32_t>(middle) & ~0xffu) | level);
}

// The cell nearest to a magnitude: in a sum with 2^23, the lowest bits are the nearest integer.
QSGD_INLINE uint32_t eden_cell(int bits, float magnitude) {
  const auto last = static_cast<float>(eden_cells(bits) - 1);
  return bit_cast<uint32_t>(fminf(magnitude, last) + 0x1p23f) - 0x4b000000u;
}

// Sets the cells from the edge below a level to the edge above it, as in EdenTable (kernels.h).
// Returns the edge above if the one below is in the same cell: for 8 bits, the last two are.
template <class Set>
QSGD_TABLE inline __attribute__((always_inline)) float eden_set_cells(int bits, uint32_t level,
                                                                      const Set& set) {
  const float edge = eden_edge(bits, level), none = bit_cast<float>(kEdenNoEdge | level);
  const uint32_t last = eden_cell(bits, edge);
  uint32_t cell = level == 0 ? 0 : eden_cell(bits, eden_edge(bits, level - 1)) + 1;
  if (cell > last) return edge;
  for (; cell < last; ++cell) set(cell, none);
  set(last, edge);
  return none;
}

// The seed of the bucket that begins with element `first` of its tensor.
template <class Noise>
QSGD_INLINE uint32_t eden_seed(const Noise& philox, uint64_t first) {
  return philox.block(first / kTile * kTileBlocks).word[0] % kEdenSeeds;
}
QSGD_INLINE uint32_t eden_seed_in(float scale) { return bit_cast<uint32_t>(scale) % kEdenSeeds; }

// The nearest number whose lowest bits are the seed.
QSGD_INLINE float eden_with_seed(float u, uint32_t seed) {
  constexpr float kLargest = 0x1.fffffep127f;
  const auto bits = bit_cast<uint32_t>(u < kLargest ? u : kLargest);
  const uint32_t near = (bits - seed + kEdenSeeds / 2) / kEdenSeeds * kEdenSeeds + seed;
  return bit_cast<float>(near < kInfinity ? near : near - kEdenSeeds);
}

// A power of two that scales the largest magnitude to nearly 1.
QSGD_INLINE float eden_lift(uint32_t most) {
  const uint32_t exponent = most >> 23;
  return bit_cast<float>((exponent == 0 ? 253u : exponent > 253 ? 1u : 254u - exponent) << 23);
}

// Counter of word `number` of a seed's signs, for the first or the second rotation: element 512 b +
// 16 k + l has bit 31 - k of word 16 b + l. The hash is Wellons's (Prospecting for hash functions,
// 2018), of counters that are unique to the seed.
constexpr int kSignBlock = 512;
constexpr int kSignWords = 16;
constexpr uint32_t kSignHash1 = 0x7feb352du, kSignHash2 = 0x846ca68bu;
QSGD_INLINE constexpr uint32_t eden_sign_counter(uint32_t seed, uint32_t which, uint32_t number) {
  return (seed << 12 | which << 11) + number;
}

}  // namespace qsgd
