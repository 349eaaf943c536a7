// What a code of gradients consists of; docs/design.md has the steps to add one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "quant/codec.h"

namespace qsgd {

// What of a CodecSpec counts for a code, and what it is like.
enum CodeFlags : unsigned {
  kPlain = 0,
  kNormed = 1,  // norm says which scale
  kRounds = 2,  // rounding and contract count
  kKeeps = 4,   // k says how many elements of a bucket
  kBiased = 8,  // whatever the rounding
  // A code's length depends on the elements: each bucket has a slot of as many bytes as it may
  // take, which begins with a SlotLength and is filled up with zeros.
  kVaries = 16,
  kRotates = 32,  // its buckets are powers of two
};

// Bytes of a slot that are used behind it.
using SlotLength = uint32_t;
inline size_t used_bytes(const uint8_t* slot) {
  SlotLength length;
  std::memcpy(&length, slot, sizeof length);
  return length;
}

struct CodeTraits {
  const char* name;
  // Per element; where they are equal there is no choice.
  int fewest_bits;
  int most_bits;
  int scales;  // float32 of a bucket
  unsigned flags;
  int worth_bits = 0;   // those with which QSGD loses about as much; 0: its own
  int fewest_auto = 4;  // of those that the planner chooses: with fewer, training may notice

  bool has_choice() const { return fewest_bits != most_bits; }
  bool has(CodeFlags flag) const { return (flags & flag) != 0; }
};

// Arguments and results as of the functions of the same names in codec.h.
class Code {
 public:
  const CodeTraits traits;

  // By default elements are packed in tiles of spec.bits.
  virtual size_t code_bytes(const CodecSpec& spec, size_t count) const;
  // On the wire, in the mean of normally distributed elements: code_bytes where the length does not
  // vary.
  virtual double mean_code_bytes(const CodecSpec& spec, size_t count) const;
  virtual bool encode(const void* x, DType dtype, size_t count, uint64_t first,
                      const CodecSpec& spec, const NoiseKey& key, float* scales,
                      uint8_t* codes) const = 0;
  // By default a piece of whole buckets at a time, in the caches: coded, decoded and compared.
  virtual bool encode_keeping(const void* x, DType dtype, float by, size_t count, uint64_t first,
                              const CodecSpec& spec, const NoiseKey& key, float* scales,
                              uint8_t* codes, float* left) const;
  virtual bool decode(const float* scales, const uint8_t* codes, size_t count,
                      const CodecSpec& spec, void* out, DType dtype) const = 0;
  virtual void decode_add(const float* scales, const uint8_t* codes, size_t count,
                          const CodecSpec& spec, float* sum) const = 0;

 protected:
  constexpr explicit Code(const CodeTraits& t) : traits(t) {}
  ~Code() = default;
};

// Calls use(at, size, floats) for pieces of whole buckets that stay in the first-level cache:
// small, so that memory is read all the time.
template <class Use>
void by_pieces(size_t count, uint32_t bucket, const Use& use) {
  constexpr size_t kPiece = 2048;  // elements
  const size_t piece = std::max<size_t>(bucket, kPiece / bucket * bucket);
  std::vector<float> floats(std::min(count, piece));
  for (size_t at = 0; at < count; at += piece) {
    use(at, std::min(piece, count - at), floats.data());
  }
}

// left[i] = value[i] - left[i], where that was what decoders see; zero where it is not finite.
void keep_rest(const float* value, size_t count, float* left);

// Codes that take float32, one bucket after another.
class BucketCode : public Code {
 public:
  bool encode(const void* x, DType dtype, size_t count, uint64_t first, const CodecSpec& spec,
              const NoiseKey& key, float* scales, uint8_t* codes) const final;
  bool decode(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
              void* out, DType dtype) const final;
  void decode_add(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                  float* sum) const final;

 protected:
  using Code::Code;
  // What the buckets of a run share.
  struct Scratch {
    std::vector<uint8_t> integers;
    std::vector<uint16_t> noise;
    std::vector<uint8_t> bytes;
    std::vector<float> values;
    std::vector<uint32_t> maxima;
    std::vector<uint64_t> ranks;
  };
  // Returns false when the bucket holds NaN or Inf; it then decodes to what is not finite. Element
  // `first` of the key's tensor is x[0].
  virtual bool encode_bucket(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                             const NoiseKey& key, float* scales, uint8_t* codes,
                             Scratch& scratch) const = 0;
  // Any codes and scales are safe: those that no encoder writes give some number. Returns whether
  // all values are finite.
  virtual bool decode_bucket(const float* scales, const uint8_t* codes, size_t count,
                             const CodecSpec& spec, float* out, Scratch& scratch) const = 0;
  // Adds what decode_bucket gives.
  virtual void add_bucket(const float* scales, const uint8_t* codes, size_t count,
                          const CodecSpec& spec, float* sum, Scratch& scratch) const;

 private:
  bool encode_floats(const float* x, size_t count, uint64_t first, const CodecSpec& spec,
                     const NoiseKey& key, float* scales, uint8_t* codes) const;
  bool decode_floats(const float* scales, const uint8_t* codes, size_t count, const CodecSpec& spec,
                     float* out) const;
};

// Codes of one small integer per element, which are packed here.
class IntegerCode : public BucketCode {
 protected:
  using BucketCode::BucketCode;
  // `noise` holds 16 uniform bits per element in whole tiles; null where rounding is not random.
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

// By the numbers of their schemes.
std::vector<std::string> code_names();
// Throws a usage error that lists what is known.
Scheme parse_scheme(const std::string& name);

}  // namespace qsgd
