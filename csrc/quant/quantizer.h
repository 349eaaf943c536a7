// QSGD: stochastic rounding to s levels of a bucket's norm (Alistarh et al., NeurIPS 2017,
// sec. 3.1).
#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/noise.h"

namespace qsgd {

constexpr uint32_t kMaxBucket = 1u << 16;  // keeps a bucket's sum in the first-level cache

enum class Norm : uint8_t { kMax = 0, kL2 = 1 };

struct QuantSpec {
  int bits = 4;  // per element, sign included: 2, 4 or 8
  Norm norm = Norm::kMax;
  uint32_t bucket = 512;  // elements that share one norm; a multiple of kTile

  int levels() const { return (1 << (bits - 1)) - 1; }
  size_t buckets(size_t count) const { return (count + bucket - 1) / bucket; }
  // Codes come in whole tiles; the last one is padded with the code of zero.
  size_t code_bytes(size_t count) const {
    return (count + kTile - 1) / kTile * static_cast<size_t>(kTile / 8 * bits);
  }
  bool operator==(const QuantSpec& o) const {
    return bits == o.bits && norm == o.norm && bucket == o.bucket;
  }
};

// Throws a usage error that names the value and what is allowed.
void check(const QuantSpec& spec);

// Codes `count` elements (one bucket at most) that begin at element `first` of the key's tensor;
// first is a multiple of the bucket. Writes code_bytes(count) and returns the bucket's norm: NaN
// when an element is NaN or Inf, so that every decoder of the bucket sees it.
float encode_bucket(const float* x, size_t count, uint64_t first, const QuantSpec& spec,
                    const NoiseKey& key, uint8_t* codes);

// out[i] = value of code i, for one bucket.
void decode_bucket(float norm, const uint8_t* codes, size_t count, const QuantSpec& spec,
                   float* out);

// out[i] += value of code i, for one bucket.
void decode_add_bucket(float norm, const uint8_t* codes, size_t count, const QuantSpec& spec,
                       float* out);

// True when no element is NaN or Inf.
bool all_finite(const float* x, size_t count);

}  // namespace qsgd
