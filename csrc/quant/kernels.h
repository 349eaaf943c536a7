// The loops of the codec, one set per instruction set, all with the same results bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "quant/noise.h"

namespace qsgd {

constexpr size_t kHashBlock = 1 << 14;  // bytes; wire.cc combines the hashes of blocks

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

  // By "add to out" and bits: level times unit for whole tiles.
  using Dequantize = void (*)(const uint8_t* codes, size_t tiles, float unit, float* out);
  Dequantize dequantize[2][9];

  void (*add)(float* y, const float* x, size_t count);

  // Of up to kHashBlock bytes; any flipped bit changes it.
  uint64_t (*hash)(const uint8_t* bytes, size_t size);
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
