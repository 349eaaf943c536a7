// The QSGD paper's own coding of gradients in s levels of an L2 norm: as many bits as the levels of
// a bucket need. Alistarh et al., QSGD, NeurIPS 2017, section 3.2.
//
// A message is a header and one stream of bits. For every bucket the stream holds its norm as
// float32, then
//   sparse  for every element whose level is not 0: omega(distance from the one before), its sign,
//           omega(level); a distance to just behind the bucket ends it (Theorem 3.2's code);
//   dense   for every element: omega(level + 1), and its sign if the level is not 0; shorter once
//           most levels are not 0, from about s = 2 sqrt(bucket) on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "quant/noise.h"

namespace qsgd {

struct EliasSpec {
  uint32_t levels;  // s, on each side of zero
  uint32_t bucket;  // elements that share a norm; a multiple of kTile
  bool sparse;
};

constexpr uint32_t kMaxEliasLevels = 1u << 20;
constexpr uint32_t kMaxEliasBucket = 1u << 30;

// Throws a usage error that names the value and what is allowed.
void check(const EliasSpec& spec);

// A bucket that holds NaN or Inf decodes to NaN.
std::vector<uint8_t> elias_encode(const float* x, size_t count, const EliasSpec& spec,
                                  const NoiseKey& key);

// The message says how it was coded. Throws when it is damaged or does not hold `count` elements.
void elias_decode(const uint8_t* message, size_t size, size_t count, float* out);

}  // namespace qsgd
