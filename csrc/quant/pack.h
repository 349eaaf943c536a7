// Packing of a tile's codes, one byte per element, to their bytes on the wire; see codec.h.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/clones.h"
#include "quant/noise.h"

namespace qsgd {

// Processes eight codes together: their fields cannot overlap. Independent of the byte order.
constexpr uint64_t kEveryByte = 0x0101010101010101u;

// One field: byte i has the `Bits` lowest bits of elements i, i + stride, i + 2 stride...
template <int Bits>
QSGD_INLINE void pack_field(const uint64_t* code, int shift, uint64_t* out) {
  constexpr uint64_t kMask = kEveryByte * ((1u << Bits) - 1);
#pragma GCC unroll 8
  for (int i = 0; i < Bits; ++i) {
    uint64_t word = 0;
#pragma GCC unroll 8
    for (int part = 0; part < 8 / Bits; ++part) {
      word |= ((code[i + part * Bits] >> shift) & kMask) << (part * Bits);
    }
    out[i] = word;
  }
}

template <int Bits>
QSGD_INLINE void unpack_field(const uint64_t* in, int shift, uint64_t* code) {
  constexpr uint64_t kMask = kEveryByte * ((1u << Bits) - 1);
#pragma GCC unroll 8
  for (int i = 0; i < Bits; ++i) {
#pragma GCC unroll 8
    for (int part = 0; part < 8 / Bits; ++part) {
      code[i + part * Bits] |= ((in[i] >> (part * Bits)) & kMask) << shift;
    }
  }
}

// Packs the kTile codes of a tile into 8 * Bits bytes: the highest bits first.
template <int Bits>
QSGD_INLINE void pack_tile(const uint8_t* code, uint8_t* out) {
  uint64_t words[8], packed[8];
  std::memcpy(words, code, sizeof words);
  if constexpr (Bits == 8) pack_field<8>(words, 0, packed);
  if constexpr (Bits >= 4 && Bits < 8) pack_field<4>(words, Bits - 4, packed);
  if constexpr ((Bits & 2) != 0) pack_field<2>(words, Bits & 1, packed + (Bits & 4));
  if constexpr ((Bits & 1) != 0) pack_field<1>(words, 0, packed + (Bits & 6));
  std::memcpy(out, packed, 8 * Bits);
}

// The inverse.
template <int Bits>
QSGD_INLINE void unpack_tile(const uint8_t* in, uint8_t* code) {
  uint64_t words[8] = {}, packed[8];
  std::memcpy(packed, in, 8 * Bits);
  if constexpr (Bits == 8) unpack_field<8>(packed, 0, words);
  if constexpr (Bits >= 4 && Bits < 8) unpack_field<4>(packed, Bits - 4, words);
  if constexpr ((Bits & 2) != 0) unpack_field<2>(packed + (Bits & 4), Bits & 1, words);
  if constexpr ((Bits & 1) != 0) unpack_field<1>(packed + (Bits & 6), 0, words);
  std::memcpy(code, words, sizeof words);
}

}  // namespace qsgd
