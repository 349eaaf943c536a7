#include "quant/casts.h"

#include <cstring>

namespace qsgd {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;

// a where the condition holds, else b: by masks, because compilers move the floating-point work of
// one case into a branch, and then do not vectorise.
QSGD_INLINE uint32_t choose(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = condition ? ~0u : 0u;
  return (a & mask) | (b & ~mask);
}

// The same results as the casts of common/dtype.h, without a branch: every case is computed.
QSGD_INLINE uint16_t half_of(float x) {
  const auto u = bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  // The sum's last bit is 2^-24, the unit of subnormal halves: the FPU rounds.
  const uint32_t tiny = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t beyond = magnitude > kInfinity ? 0x7e00u : 0x7c00u;
  const uint32_t bounded = magnitude >= 0x47800000u ? beyond : normal;
  return static_cast<uint16_t>(sign | choose(magnitude < 0x38800000u, tiny, bounded));
}

QSGD_INLINE float from_half(uint16_t half) {
  const uint32_t sign = (uint32_t{half} & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t{half} & 0x7fffu;
  const uint32_t tiny =
      bit_cast<uint32_t>(static_cast<float>(static_cast<int>(magnitude)) * 0x1p-24f);
  const uint32_t wide = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  return bit_cast<float>(sign | choose(magnitude < 0x400u, tiny, wide));
}

QSGD_INLINE uint16_t brain_of(float x) {
  const auto u = bit_cast<uint32_t>(x);
  const uint32_t nan = (u >> 16) | 0x40u;
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((u & 0x7fffffffu) > kInfinity ? nan : rounded);
}

QSGD_INLINE float from_brain(uint16_t brain) { return bit_cast<float>(uint32_t{brain} << 16); }

// The bits of the largest magnitude so far and of x: at least kInfinity once an element is not
// finite.
QSGD_INLINE uint32_t larger(uint32_t most, float x) {
  const uint32_t m = bit_cast<uint32_t>(x) & 0x7fffffffu;
  return m > most ? m : most;
}

template <uint16_t (*Cast)(float)>
QSGD_INLINE bool encode(const float* x, size_t count, uint8_t* codes) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    most = larger(most, x[i]);
    const uint16_t code = Cast(x[i]);
    std::memcpy(codes + 2 * i, &code, sizeof code);
  }
  return most < kInfinity;
}

template <float (*Value)(uint16_t)>
QSGD_INLINE bool decode(const uint8_t* codes, size_t count, float* out) {
  uint32_t most = 0;
  for (size_t i = 0; i < count; ++i) {
    uint16_t code;
    std::memcpy(&code, codes + 2 * i, sizeof code);
    out[i] = Value(code);
    most = larger(most, out[i]);
  }
  return most < kInfinity;
}

}  // namespace

QSGD_CLONES
bool cast_encode(const float* x, size_t count, const CodecSpec& spec, uint8_t* codes) {
  if (spec.scheme == Scheme::kFloat16) return encode<half_of>(x, count, codes);
  return encode<brain_of>(x, count, codes);
}

QSGD_CLONES
bool cast_decode(const uint8_t* codes, size_t count, const CodecSpec& spec, float* out) {
  if (spec.scheme == Scheme::kFloat16) return decode<from_half>(codes, count, out);
  return decode<from_brain>(codes, count, out);
}

}  // namespace qsgd
