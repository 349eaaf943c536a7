// Codes of gradients: conversion of elements to scales and packed codes, and back.
//
// A tensor is coded in buckets that share one scale (or two), and in tiles of kTile elements that
// are packed together. A tile of b bits is the concatenation of its fields of 8, 4, 2 and 1 bits (6
// bits: the high 4 of every element, then the low 2). In a field of f bits, byte i has elements i,
// i + 8 f, i + 16 f...: packing is shifts of complete registers on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/dtype.h"
#include "quant/code_list.h"
#include "quant/noise.h"

namespace qsgd {

constexpr uint32_t kMaxBucket = 1u << 16;  // keeps a bucket's sum in the L2 cache

enum class Scheme : uint8_t {
#define QSGD_SCHEME(scheme, name) scheme,
  QSGD_CODES(QSGD_SCHEME)
#undef QSGD_SCHEME
};
// In headers only: the pieces of the message have different codes.
constexpr Scheme kMixedScheme{0xff};

enum class Norm : uint8_t { kMax, kL2 };

enum class Rounding : uint8_t {
  kStochastic,  // unbiased
  kNearest,     // smaller error per step, but a bias that does not average out
};

struct CodecSpec {
  Scheme scheme = Scheme::kQsgd;
  // Per element, including the sign; check() has the range of each scheme.
  int bits = 4;
  Norm norm = Norm::kMax;
  Rounding rounding = Rounding::kStochastic;
  uint32_t bucket = 512;  // elements that share one scale; a multiple of kTile
  uint32_t k = 0;         // elements kept of each bucket, for schemes that keep some
  // Multiplies the scale of a bucket whose normalised variance w reaches 1 by 1/(1 + w), which
  // makes an unbiased code a contraction, as error feedback needs. Decoding is unchanged.
  bool contract = false;

  // QSGD's s: levels on each side of zero.
  int levels() const { return (1 << (bits - 1)) - 1; }
  size_t buckets(size_t count) const { return (count + bucket - 1) / bucket; }
  size_t scales(size_t count) const;      // float32 scales of `count` elements
  size_t code_bytes(size_t count) const;  // the last tile is padded with the code of zero
  size_t bytes(size_t count) const { return scales(count) * sizeof(float) + code_bytes(count); }
  // Mean size on the wire if the length of the code varies; else the same.
  double mean_bytes(size_t count) const;
  double mean_code_bytes(size_t count) const;
  bool operator==(const CodecSpec& o) const;
  bool operator!=(const CodecSpec& o) const { return !(*this == o); }
};

// Throws a usage error with the value and the allowed values.
void check(const CodecSpec& spec);

// Whether the error of one step recurs in the next, so that it does not average out. Such a code
// needs error feedback. Casts count as unbiased: their error is as small as that of sums.
bool biased(const CodecSpec& spec);

// For messages: "qsgd(bits=4, norm=max, bucket_size=512)".
std::string describe(const CodecSpec& spec);

// Codes elements [first, first + count) of the key's tensor; x[0] is element `first`, a multiple of
// the bucket. Writes spec.scales(count) scales and spec.code_bytes(count) bytes. A bucket with NaN
// or Inf decodes to non-finite values on every rank. Returns whether all elements were finite. x is
// float32, float64, float16 or bfloat16.
bool encode(const void* x, DType dtype, size_t count, uint64_t first, const CodecSpec& spec,
            const NoiseKey& key, float* scales, uint8_t* codes);

// Error feedback: codes x[i] * by + left[i], and sets left[i] to the coding error, or to zero if it
// is not finite, because NaN would persist in every later step.
bool encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                    const CodecSpec& spec, const NoiseKey& key, float* scales, uint8_t* codes,
                    float* left);

// out[i] = value of code i, for `count` elements from the beginning of a bucket. Returns whether
// all are finite.
bool decode(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
            void* out, DType dtype);

// sum[i] += value of code i.
void decode_add(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                float* sum);

// Whether no element is NaN or Inf.
bool all_finite(const float* x, size_t count);

}  // namespace qsgd
