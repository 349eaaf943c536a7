// Interface of gradient codes; docs/design.md has the steps to add one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "quant/codec.h"

namespace qsgd {

// Fields of a CodecSpec that a code uses, and properties of the code.
enum CodeFlags : unsigned {
  kPlain = 0,
  kNormed = 1,  // norm selects the scale
  kRounds = 2,  // uses rounding and contract
  kKeeps = 4,   // uses k, the number of elements kept of each bucket
  kBiased = 8,  // with any rounding
  // Variable length: each bucket has a slot of its maximum size, which begins with a SlotLength and
  // is padded with zeros.
  kVaries = 16,
  kRotates = 32,  // buckets must be powers of two
};

// Number of used bytes of a slot, after this field.
using SlotLength = uint32_t;
inline size_t used_bytes(const uint8_t* slot) {
  SlotLength length;
  std::memcpy(&length, slot, sizeof length);
  return length;
}

// Number of tiles, the last of which may be incomplete.
inline size_t tiles_of(size_t count) { return (count + kTile - 1) / kTile; }

struct CodeTraits {
  const char* name;
  // Per element; equal if there is no choice.
  int fewest_bits;
  int most_bits;
  int scales;  // float32 per bucket
  unsigned flags;
  int worth_bits = 0;   // bits with which QSGD has about the same error; 0: its own
  int fewest_auto = 4;  // for the planner: with fewer, training may be affected

  bool has_choice() const { return fewest_bits != most_bits; }
  bool has(CodeFlags flag) const { return (flags & flag) != 0; }
};

// Arguments and results are those of the functions with the same names in codec.h.
class Code {
 public:
  const CodeTraits traits;

  // Default: elements are packed in tiles with spec.bits.
  virtual size_t code_bytes(const CodecSpec& spec, size_t count) const;
  // Mean on the wire for normally distributed elements; code_bytes unless the length varies.
  virtual double mean_code_bytes(const CodecSpec& spec, size_t count) const;
  virtual bool encode(const void* x, DType dtype, size_t count, uint64_t first,
                      const CodecSpec& spec, const NoiseKey& key, float* scales,
                      uint8_t* codes) const = 0;
  virtual bool encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                              const CodecSpec& spec, const NoiseKey& key, float* scales,
                              uint8_t* codes, float* left) const = 0;
  virtual bool decode(const float* scales, const uint8_t* codes, size_t count,
                      const CodecSpec& spec, void* out, DType dtype) const = 0;
  virtual void decode_add(const float* scales, const uint8_t* codes, size_t count,
                          const CodecSpec& spec, float* sum) const = 0;

 protected:
  constexpr explicit Code(const CodeTraits& t) : traits(t) {}
  ~Code() = default;
};

// left[i] = value[i] - left[i], where left[i] was the decoded value; zero if not finite.
void keep_rest(const float* value, size_t count, float* left);

// Codes that process float32, one bucket at a time.
class BucketCode : public Code {
 public:
  bool encode(const void* x, DType dtype, size_t count, uint64_t first, const CodecSpec& spec,
              const NoiseKey& key, float* scales, uint8_t* codes) const final;
  bool encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                      const CodecSpec& spec, const NoiseKey& key, float* scales, uint8_t* codes,
                      float* left) const final;
  bool decode(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
              void* out, DType dtype) const final;
  void decode_add(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                  float* sum) const final;

 protected:
  using Code::Code;
  // Buffers shared by the buckets of a call.
  struct Scratch {
    std::vector<uint8_t> integers;
    std::vector<uint16_t> noise;
    std::vector<uint8_t> bytes;
    std::vector<float> values;
    std::vector<float> kept;  // of keep_bucket() alone
    std::vector<uint32_t> maxima;
    std::vector<uint64_t> ranks;
  };
  // Returns false if the bucket contains NaN or Inf; it then decodes to non-finite values. x[0] is
  // element `first` of the key's tensor.
  virtual bool encode_bucket(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                             const NoiseKey& key, float* scales, uint8_t* codes,
                             Scratch& scratch) const = 0;
  // Codes a bucket, and replaces it by the coding error. Default: decodes it.
  virtual bool keep_bucket(float* left, size_t count, uint64_t first, const CodecSpec& spec,
                           const NoiseKey& key, float* scales, uint8_t* codes,
                           Scratch& scratch) const;
  // Must accept any codes and scales: those that no encoder writes decode to some numbers. Returns
  // whether all values are finite.
  virtual bool decode_bucket(const float* scales, const uint8_t* codes, size_t count,
                             const CodecSpec& spec, float* out, Scratch& scratch) const = 0;
  // Adds the result of decode_bucket().
  virtual void add_bucket(const float* scales, const uint8_t* codes, size_t count,
                          const CodecSpec& spec, float* sum, Scratch& scratch) const;

 private:
  bool encode_floats(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                     const NoiseKey& key, float* scales, uint8_t* codes) const;
  bool decode_floats(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                     float* out) const;
};

// Codes with one small integer per element, packed here.
class IntegerCode : public BucketCode {
 protected:
  using BucketCode::BucketCode;
  // `noise` has 16 uniform bits per element, for complete tiles; null if rounding is not
  // stochastic.
  virtual bool encode_integers(const float* x, size_t count, const CodecSpec& spec,
                               const uint16_t* noise, float* scales, uint8_t* integers) const = 0;
  virtual void decode_integers(const float* scales, const uint8_t* integers, size_t count,
                               const CodecSpec& spec, float* out) const = 0;

 private:
  bool encode_bucket(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                     const NoiseKey& key, float* scales, uint8_t* codes,
                     Scratch& scratch) const final;
  bool decode_bucket(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                     float* out, Scratch& scratch) const final;
};

const Code& code_of(Scheme scheme);
inline const CodeTraits& traits_of(Scheme scheme) { return code_of(scheme).traits; }

// In the order of Scheme.
std::vector<std::string> code_names();
// Throws a usage error that lists the known names.
Scheme parse_scheme(const std::string& name);

}  // namespace qsgd
