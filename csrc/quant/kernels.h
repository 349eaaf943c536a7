// The loops of the codec, one set per instruction set, all with the same results bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "quant/noise.h"

namespace qsgd {

// Fixed-point numbers of 16 bits behind the point, for an element as large as the norm.
constexpr float whole_scale(int levels) { return static_cast<float>(levels) * 0x1p16f; }

// Whether elements can be multiplied by it as they are: the norm is finite, and neither zero nor so
// small that its inverse is beyond float32.
constexpr bool is_plain(float scale) {
  return scale > 0 && scale <= std::numeric_limits<float>::max();
}

// A hash on the way: word i of what is hashed goes to lane i % 64 (wire.h).
constexpr size_t kHashRow = 256;  // bytes: a word for each lane
constexpr uint32_t kStir = 0x9E3779B1u;
struct HashLanes {
  alignas(64) uint32_t word[kHashRow / sizeof(uint32_t)];
};

// The element types that the loops read and write themselves.
constexpr int kernel_type(DType dtype) {
  return dtype == DType::kFloat32    ? 0
         : dtype == DType::kFloat16  ? 1
         : dtype == DType::kBFloat16 ? 2
                                     : -1;
}

// How EDEN (eden.h) codes and decodes in some number of bits.
constexpr int kEdenCells = 256;
struct EdenTable {
  // By the cell that a magnitude is nearest to: the edge of a level that lies there, or a number
  // above all magnitudes; in its lowest byte how many edges lie below. Beyond the last cell is
  // another edge of 8 bits.
  alignas(64) uint32_t edges[kEdenCells];
  uint32_t last_edge;
  alignas(64) uint32_t values[256];  // the float32 of each code
};

struct Kernels {
  const char* name;

  // The largest magnitude as an integer: ordered like the floats, with Inf and NaN above all
  // others, so that one pass finds both the norm and any element that is not finite.
  uint32_t (*max_magnitude)(const float* x, size_t count);

  // Element i is added to partial sum i % 32, in order; the 32 are added in halves, i and i + 16
  // first. Squares of float32 are exact in float64, so fused or not is the same.
  double (*sum_squares)(const float* x, size_t count);

  void (*noise)(const NoiseKey& key, uint64_t first_tile, size_t tiles, uint16_t* out);

  // By rounding and bits: codes of whole tiles. `scale` is 2^16 levels over the norm: a level has
  // 16 bits behind the point, and noise of 16 bits carries it up with just that probability.
  using Quantize = void (*)(const float* x, size_t tiles, float scale, const NoiseKey& key,
                            uint64_t first_tile, uint8_t* codes);
  Quantize quantize[2][9];

  // The same, and what it leaves: left[i] = x[i] - level times unit. `source` is where the next x
  // will come from, and is fetched with what lies behind `left`.
  using QuantizeKeeping = void (*)(const float* x, size_t tiles, float scale, float unit,
                                   const NoiseKey& key, uint64_t first_tile, uint8_t* codes,
                                   float* left, const float* source);
  QuantizeKeeping quantize_keeping[2][9];

  // By kernel_type(): to[i] = x[i] * by + left[i]. Returns the largest magnitude among them, as
  // max_magnitude does.
  uint32_t (*carry[3])(const void* x, size_t count, float by, const float* left, float* to);

  // Sum of f (2^16 - f), where f are the 16 bits behind the point of x[i] * scale in whole tiles:
  // 2^32 times the variance of what random rounding makes of them. At most 2^16 elements.
  uint64_t (*variance)(const float* x, size_t tiles, float scale);

  // By kernel_type(), rounding and bits: the same of whole buckets by their largest
  // magnitude, which goes to `norms`, as long as is_plain(scale). Returns how many that were.
  using QuantizeBuckets = size_t (*)(const void* x, size_t buckets, size_t bucket_tiles,
                                     const NoiseKey& key, uint64_t first_tile, float* norms,
                                     uint8_t* codes);
  QuantizeBuckets quantize_buckets[3][2][9];

  // By kernel_type() and bits: level times unit for whole tiles; or added to float32.
  using Dequantize = void (*)(const uint8_t* codes, size_t tiles, float unit, void* out);
  Dequantize dequantize[3][9];
  Dequantize dequantize_add[9];

  // EDEN's steps, of a whole bucket of `size` elements, a power of two from kTile on, and so is
  // `work`. Each two share the rotations, without their factors of 1 / sqrt(size): what falls
  // within a few registers is the second one's.
  //
  // work = x times lift, rotated. Returns |x lift|^2.
  float (*eden_rotate)(const float* x, size_t size, float lift, uint32_t seed, float* work);
  // By bits: codes of `work` times scale, in cells. Returns the scalar product of these with the
  // levels that they were taken for.
  float (*eden_code[9])(const float* work, size_t size, float scale, const EdenTable& table,
                        uint8_t* codes);
  // By bits: the levels of codes, rotated back.
  void (*eden_values[9])(const uint8_t* codes, size_t size, uint32_t seed, const EdenTable& table,
                         float* work);
  // By "add": out = `work` times unit.
  void (*eden_restore[2])(const float* work, size_t size, uint32_t seed, float unit, float* out);

  // By "bfloat16": float16 or bfloat16 elements, which need no alignment, to and from float32,
  // rounded to nearest, ties to even; beyond the range is Inf. Returns the largest magnitude among
  // the float32, as max_magnitude does.
  uint32_t (*widen[2])(const void* from, size_t count, float* to);
  uint32_t (*shorten[2])(const float* from, size_t count, void* to);

  void (*add)(float* y, const float* x, size_t count);

  // Each word is stirred into its lane: h = (lane ^ word) * kStir, lane = h ^ (h >> 15).
  void (*hash_take)(HashLanes& lanes, const uint8_t* bytes, size_t rows);
};

// The set in use: the fastest that this machine has, unless chosen otherwise.
const Kernels& kernels();

// Those that this machine can run, fastest first; "scalar" is always among them.
std::vector<std::string> instruction_sets();

// For tests and comparisons. Throws a usage error that lists what this machine has.
void use_instruction_set(const std::string& name);

// What each file of kernels offers, or null where it was compiled for another machine.
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* neon_kernels();
const Kernels* scalar_kernels();

}  // namespace qsgd
