// The AES round by tables, for machines without the instruction; tables are computed from FIPS-197.
#pragma once

#include <array>
#include <cstdint>

namespace qsgd {

// Product in GF(2^8) modulo x^8 + x^4 + x^3 + x + 1.
constexpr uint8_t gf_times(uint8_t a, uint8_t b) {
  unsigned product = 0, shifted = a;
  for (unsigned bit = 0; bit < 8; ++bit) {
    if (b >> bit & 1) product ^= shifted;
    shifted = (shifted << 1) ^ (shifted & 0x80 ? 0x11b : 0);
  }
  return static_cast<uint8_t>(product);
}

// SubBytes of one byte: the inverse (x^254; 0 stays 0), then the affine map.
constexpr uint8_t aes_substitute(uint8_t x) {
  uint8_t inverse = 1, power = x;
  for (int exponent = 254; exponent; exponent >>= 1) {
    if (exponent & 1) inverse = gf_times(inverse, power);
    power = gf_times(power, power);
  }
  unsigned out = 0x63;
  for (int turn = 0; turn < 5; ++turn) out ^= inverse << turn | inverse >> (8 - turn);
  return static_cast<uint8_t>(out);
}

constexpr std::array<uint8_t, 256> make_sbox() {
  std::array<uint8_t, 256> box{};
  for (unsigned x = 0; x < 256; ++x) box[x] = aes_substitute(static_cast<uint8_t>(x));
  return box;
}
inline constexpr std::array<uint8_t, 256> kAesBox = make_sbox();

// SubBytes and MixColumns of a byte in row 0; the other rows are rotations of it.
constexpr std::array<uint32_t, 256> make_columns() {
  std::array<uint32_t, 256> table{};
  for (unsigned x = 0; x < 256; ++x) {
    const uint32_t s = kAesBox[x];
    const uint32_t twice = gf_times(kAesBox[x], 2);
    table[x] = twice | s << 8 | s << 16 | (twice ^ s) << 24;
  }
  return table;
}
inline constexpr std::array<uint32_t, 256> kAesColumns = make_columns();

}  // namespace qsgd
