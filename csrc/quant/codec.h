// Codes of gradients: how elements become scales and packed codes, and come back.
//
// A tensor is coded in buckets that share one scale (or two), and in tiles of kTile elements that
// are packed together. A tile of b bits is the concatenation of its fields of 8, 4, 2 and 1 bits
// (6 bits: the high 4 of every element, then the low 2), and in a field of f bits byte i holds
// elements i, i + 8 f, i + 16 f...: packing is whole-register shifts on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "quant/code_list.h"
#include "quant/noise.h"

namespace qsgd {

constexpr uint32_t kMaxBucket = 1u << 16;  // keeps a bucket's sum in the second-level cache

enum class Scheme : uint8_t {
#define QSGD_SCHEME(scheme, name) scheme,
  QSGD_CODES(QSGD_SCHEME)
#undef QSGD_SCHEME
};
// In headers alone: the pieces of the message are coded in several ways.
constexpr Scheme kMixedScheme{0xff};

enum class Norm : uint8_t { kMax, kL2 };

enum class Rounding : uint8_t {
  kStochastic,  // unbiased
  kNearest,     // smaller error of one step, but a bias that does not average out
};

struct CodecSpec {
  Scheme scheme = Scheme::kQsgd;
  // Per element, sign included; check() says which a scheme has.
  int bits = 4;
  Norm norm = Norm::kMax;
  Rounding rounding = Rounding::kStochastic;
  uint32_t bucket = 512;  // elements that share one scale; a multiple of kTile
  uint32_t k = 0;         // elements kept of each bucket, where the scheme keeps some
  // Shrinks the scale of a bucket whose normalised variance w reaches 1 by 1/(1 + w), which makes
  // an unbiased code a contraction, as error feedback needs. Decoders need not know.
  bool contract = false;

  // QSGD's s: levels on each side of zero.
  int levels() const { return (1 << (bits - 1)) - 1; }
  size_t buckets(size_t count) const { return (count + bucket - 1) / bucket; }
  size_t scales(size_t count) const;      // float32 scales of `count` elements
  size_t code_bytes(size_t count) const;  // the last tile is padded with the code of zero
  size_t bytes(size_t count) const { return scales(count) * sizeof(float) + code_bytes(count); }
  // What travels of them in the mean, where the length of the code varies; else the same.
  double mean_bytes(size_t count) const;
  double mean_code_bytes(size_t count) const;
  bool operator==(const CodecSpec& o) const;
  bool operator!=(const CodecSpec& o) const { return !(*this == o); }
};

// Throws a usage error that names the value and what is allowed.
void check(const CodecSpec& spec);

// Does the error of one step return in the next, so that it does not average out? Such a code wants
// error feedback. Casts count as unbiased: theirs is as small as that of the sums.
bool biased(const CodecSpec& spec);

// For messages: "qsgd(bits=4, norm=max, bucket_size=512)".
std::string describe(const CodecSpec& spec);

// Codes elements [first, first + count) of the key's tensor, x[0] being element `first`, a multiple
// of the bucket. Writes spec.scales(count) scales and spec.code_bytes(count) bytes. A bucket that
// holds NaN or Inf decodes to values that are not finite on every rank. Returns whether all
// elements were finite. x is float32, float64, float16 or bfloat16.
bool encode(const void* x, DType dtype, size_t count, uint64_t first, const CodecSpec& spec,
            const NoiseKey& key, float* scales, uint8_t* codes);

// Error feedback: the same of x[i] * by + left[i], which sets left[i] to what the code leaves of
// it; to zero where that is not finite, since a NaN carried on would spoil every later step.
bool encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                    const CodecSpec& spec, const NoiseKey& key, float* scales, uint8_t* codes,
                    float* left);

// out[i] = value of code i, for `count` elements from a bucket's begin on. Returns whether all are
// finite.
bool decode(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
            void* out, DType dtype);

// sum[i] += value of code i.
void decode_add(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                float* sum);

// True when no element is NaN or Inf.
bool all_finite(const float* x, size_t count);

}  // namespace qsgd
