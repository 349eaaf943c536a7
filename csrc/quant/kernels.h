// Loops of the codec, one set per instruction set, all with bit-identical results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "quant/eden.h"
#include "quant/noise.h"

namespace qsgd {

// Scale to fixed-point numbers with 16 fractional bits, for an element equal to the norm.
constexpr float whole_scale(int levels) { return static_cast<float>(levels) * 0x1p16f; }

// Whether elements can be multiplied by this scale directly: the norm is finite, and neither zero
// nor so small that its inverse is beyond float32.
constexpr bool is_plain(float scale) { return scale > 0 && scale <= kLargestFloat; }

// State of a hash: word i of the input goes to lane i % 64 (wire.h).
constexpr size_t kHashRow = 256;  // bytes: one word per lane
constexpr uint32_t kMix = 0x9E3779B1u;
struct HashLanes {
  alignas(64) uint32_t word[kHashRow / sizeof(uint32_t)];
};

// Index of the element types that the loops support directly; -1: others.
constexpr int kernel_type(DType dtype) {
  return dtype == DType::kFloat32    ? 0
         : dtype == DType::kFloat16  ? 1
         : dtype == DType::kBFloat16 ? 2
                                     : -1;
}

// A table of 32-bit entries, and the same by byte, for instruction sets that look up bytes.
template <int N>
struct ByteTable {
  alignas(64) uint32_t entries[N];
  alignas(64) uint8_t bytes[4][N];

  void set(uint32_t at, uint32_t entry) {
    entries[at] = entry;
    for (int byte = 0; byte < 4; ++byte) bytes[byte][at] = static_cast<uint8_t>(entry >> 8 * byte);
  }
};

// Tables of EDEN (eden.h) for some number of bits.
struct EdenTable {
  // By the cell nearest to a magnitude: the edge of a level in that cell, or a number above all
  // magnitudes; its lowest byte is the number of edges below. For 8 bits, last_edge is another edge
  // beyond the last cell.
  ByteTable<kEdenCells> edges;
  uint32_t last_edge;
  ByteTable<256> values;  // the float32 of each code
};

struct Kernels {
  const char* name;

  // The largest magnitude as an integer: ordered like the floats, with Inf and NaN above all
  // others, so that one pass finds both the norm and non-finite elements.
  uint32_t (*max_magnitude)(const float* x, size_t count);

  // Element i is added to partial sum i % 32, in order; the 32 are added in halves, i and i + 16
  // first. Squares of float32 are exact in float64, so fused multiply-add gives the same result.
  double (*sum_squares)(const float* x, size_t count);

  void (*noise)(const NoiseKey& key, uint64_t first_tile, size_t tiles, uint16_t* out);

  // By rounding and bits: codes of complete tiles. `scale` is 2^16 levels over the norm: a level
  // has 16 fractional bits, and adding 16 bits of noise rounds it up with exactly that probability.
  using Quantize = void (*)(const float* x, size_t tiles, float scale, const NoiseKey& key,
                            uint64_t first_tile, uint8_t* codes);
  Quantize quantize[2][9];

  // The same, with the coding error: left[i] = x[i] - level times unit. `source` is the memory of
  // the next x, prefetched together with the memory after `left`.
  using QuantizeKeeping = void (*)(const float* x, size_t tiles, float scale, float unit,
                                   const NoiseKey& key, uint64_t first_tile, uint8_t* codes,
                                   float* left, const float* source);
  QuantizeKeeping quantize_keeping[2][9];

  // By kernel_type(): to[i] = x[i] * by + left[i]. Returns the largest magnitude, as max_magnitude
  // does. `fetch`: prefetches the memory after x and left, if no later step does.
  uint32_t (*scale_add[3])(const void* x, size_t count, float by, const float* left, float* to,
                           bool fetch);

  // Sum of f (2^16 - f), where f are the 16 fractional bits of x[i] * scale, over complete tiles:
  // 2^32 times the variance of stochastic rounding. At most 2^16 elements.
  uint64_t (*variance)(const float* x, size_t tiles, float scale);

  // By kernel_type(), rounding and bits: codes complete buckets with their largest magnitude as
  // norm, written to `norms`, as long as is_plain(scale). Returns the number of coded buckets.
  using QuantizeBuckets = size_t (*)(const void* x, size_t buckets, size_t bucket_tiles,
                                     const NoiseKey& key, uint64_t first_tile, float* norms,
                                     uint8_t* codes);
  QuantizeBuckets quantize_buckets[3][2][9];

  // By bits: packs the codes of complete tiles, one byte each (pack.h), and the inverse.
  using Pack = void (*)(const uint8_t* code, size_t tiles, uint8_t* out);
  Pack pack[9], unpack[9];

  // By kernel_type() and bits: level times unit, for complete tiles; dequantize_add adds it to
  // float32.
  using Dequantize = void (*)(const uint8_t* codes, size_t tiles, float unit, void* out);
  Dequantize dequantize[3][9];
  Dequantize dequantize_add[9];

  // Steps of EDEN for a complete bucket of `size` elements, a power of two of at least kTile, as is
  // `work`. Consecutive steps share the rotations, without their factors of 1 / sqrt(size): the
  // butterflies within a few registers are left to the second step.
  //
  // work = x times lift, rotated. Returns |x lift|^2.
  float (*eden_rotate)(const float* x, size_t size, float lift, uint32_t seed, float* work);
  // By bits: codes of `work` times scale, in cells. Returns the scalar product of these with their
  // levels. Index 1 replaces `work` by what eden_values makes of the codes.
  using EdenCode = float (*)(float* work, size_t size, float scale, uint32_t seed,
                             const EdenTable& table, uint8_t* codes);
  EdenCode eden_code[2][9];
  // By bits: the levels of codes, rotated back.
  void (*eden_values[9])(const uint8_t* codes, size_t size, uint32_t seed, const EdenTable& table,
                         float* work);
  // out = `work` times unit; index 1: out += that; index 2: out -= that.
  void (*eden_restore[3])(const float* work, size_t size, uint32_t seed, float unit, float* out);

  // Index 1: bfloat16, else float16. Unaligned elements to and from float32, rounded to nearest,
  // ties to even; Inf beyond the range. Returns the largest magnitude of the float32 values, as
  // max_magnitude does.
  uint32_t (*widen[2])(const void* from, size_t count, float* to);
  uint32_t (*shorten[2])(const float* from, size_t count, void* to);

  void (*add)(float* y, const float* x, size_t count);

  // Mixes each word into its lane: h = (lane ^ word) * kMix, lane = h ^ (h >> 15).
  void (*hash_take)(HashLanes& lanes, const uint8_t* bytes, size_t rows);
};

// The current set: the fastest that this machine supports, unless another was selected.
const Kernels& kernels();

// The sets that this machine supports, fastest first; always includes "scalar".
std::vector<std::string> instruction_sets();

// For tests and comparisons. Throws a usage error that lists the sets of this machine.
void use_instruction_set(const std::string& name);

// The set of each file, or null if not supported or compiled for another machine.
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* neon_kernels();
const Kernels* scalar_kernels();

}  // namespace qsgd
