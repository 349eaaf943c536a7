#include <array>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"
#include "quant/kernel_loops.h"

namespace qsgd {

// The AES round by tables, for machines without the instruction; tables are computed from FIPS-197.

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

// Not inlined: with these long functions, the compiler takes more than twice as long.
#define QSGD_CALLED __attribute__((noinline))

// Four lanes by the compiler's vector extensions, for any processor: the reference for every
// instruction set.
struct Scalar {
  static constexpr int kLanes = 4;
  using F = float __attribute__((vector_size(16)));
  using I = uint32_t __attribute__((vector_size(16)));
  using D = double __attribute__((vector_size(16)));

  template <class T, class Op>
  static QSGD_INLINE T each(Op op) {
    return T{op(0), op(1), op(2), op(3)};
  }
  template <class T>
  static QSGD_INLINE T read(const void* from) {
    T out;
    std::memcpy(&out, from, sizeof out);
    return out;
  }

  static QSGD_INLINE F load(const float* x) { return read<F>(x); }
  static QSGD_INLINE void store(float* to, F a) { std::memcpy(to, &a, sizeof a); }
  template <class Short>  // Float16 or BFloat16, unaligned
  static QSGD_CALLED F load(const Short* x) {
    Short half[4];
    std::memcpy(half, x, sizeof half);
    return each<F>([&](int i) { return static_cast<float>(half[i]); });
  }
  template <class Short>
  static QSGD_CALLED void store(Short* to, F a) {
    for (int i = 0; i < 4; ++i) {
      const Short half(a[i]);
      std::memcpy(to + i, &half, sizeof half);
    }
  }
  static QSGD_INLINE F spread(float x) { return F{x, x, x, x}; }
  static QSGD_INLINE F mul(F a, F b) { return a * b; }
  static QSGD_INLINE F add(F a, F b) { return a + b; }
  static QSGD_INLINE F sub(F a, F b) { return a - b; }
  static QSGD_INLINE I bits(F a) { return reinterpret_cast<I>(a); }
  static QSGD_INLINE F of_bits(I a) { return reinterpret_cast<F>(a); }

  // To the nearest integer, ties to even, for magnitudes up to 2^31: the addition rounds.
  static QSGD_INLINE I round(F a) {
    return each<I>(
        [&](int i) { return static_cast<uint32_t>(bit_cast<uint64_t>(double{a[i]} + 0x1.8p52)); });
  }
  static QSGD_INLINE F to_float(I a) { return __builtin_convertvector(as_signed(a), F); }

  static QSGD_INLINE I load_ints(const void* from) { return read<I>(from); }
  static QSGD_INLINE void store_ints(void* to, I a) { std::memcpy(to, &a, sizeof a); }
  static QSGD_INLINE I spread(int32_t x) {
    return each<I>([&](int) { return static_cast<uint32_t>(x); });
  }
  static QSGD_INLINE I add(I a, I b) { return a + b; }
  static QSGD_INLINE I times(I a, I b) { return a * b; }
  static QSGD_INLINE I both(I a, I b) { return a & b; }
  static QSGD_INLINE I differ(I a, I b) { return a ^ b; }
  static QSGD_INLINE I min(I a, I b) { return select(reinterpret_cast<I>(a < b), a, b); }
  static QSGD_INLINE I max(I a, I b) { return select(reinterpret_cast<I>(a > b), a, b); }
  static QSGD_INLINE uint32_t largest(I a) {
    uint32_t most = 0;
    for (int i = 0; i < kLanes; ++i) most = a[i] > most ? a[i] : most;
    return most;
  }
  template <int Bits>
  static QSGD_INLINE I down(I a) {
    return a >> Bits;
  }
  template <int Bits>
  static QSGD_INLINE I down_signed(I a) {
    return reinterpret_cast<I>(as_signed(a) >> Bits);
  }

  template <int Bits>
  static QSGD_INLINE I up(I a) {
    return a << Bits;
  }
  static QSGD_INLINE I up(I a, int bits) { return a << static_cast<uint32_t>(bits); }

  // See kernels_avx512.cc.
  static QSGD_INLINE F flip(F x, I signs) { return of_bits(bits(x) ^ (signs & spread(INT32_MIN))); }
  template <int Distance>
  static QSGD_INLINE F cross(F x) {
    const F y = each<F>([&](int i) { return x[i ^ Distance]; });
    const I less = each<I>([](int i) { return i & Distance ? 0x80000000u : 0u; });
    return y + of_bits(bits(x) ^ less);
  }
  static QSGD_INLINE I count_above(I count, I a, I b) {
    return count - reinterpret_cast<I>(as_signed(a) > as_signed(b));
  }
  static QSGD_INLINE I select(I mask, I a, I b) { return (a & mask) | (b & ~mask); }
  static constexpr int kLookup = 256;
  static constexpr bool kLooksUpBytes = false;
  template <int Size>
  static QSGD_INLINE I lookup(const uint32_t* table, I index) {
    return each<I>([&](int i) { return table[index[i] % Size]; });
  }

  // Byte 2 of each of a tile's numbers, plus `offset`.
  static QSGD_INLINE void narrow(const I* numbers, int offset, uint8_t* code) {
    for (int i = 0; i < 64; ++i) {
      code[i] = static_cast<uint8_t>((numbers[i / 4][i % 4] >> 16) + unsigned(offset));
    }
  }
  static constexpr bool kPacksCodes = false;
  static constexpr bool kPacks = false;
  static QSGD_INLINE I widen(const uint8_t* code) {
    return each<I>([&](int i) { return uint32_t{code[i]}; });
  }

  static QSGD_INLINE D zeros() { return D{}; }
  static QSGD_INLINE D load_squares(const float* x, D sum) {
    const D wide{x[0], x[1]};
    return sum + wide * wide;
  }
  static QSGD_INLINE void store(double* to, D a) { std::memcpy(to, &a, sizeof a); }

  // Numbers of 128 bits: here, one per vector.
  using Blocks = I;  // of AES, one of 128 bits
  static QSGD_INLINE I ints(Blocks a) { return a; }
  static QSGD_INLINE I spread128(uint64_t low, uint64_t high) {
    return I{uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32)};
  }
  static QSGD_INLINE I count128(uint64_t low, uint64_t high) { return spread128(low, high); }
  static QSGD_INLINE I later128(I number, uint64_t by) {
    const uint64_t low = (uint64_t{number[1]} << 32 | number[0]) + by;
    return I{uint32_t(low), uint32_t(low >> 32), number[2], number[3]};
  }
  static QSGD_CALLED I aes_round(I a, I key) {
    return key ^ each<I>([&](int i) {
             const auto part = [&](int row) {
               const uint32_t t = kAesColumns[a[(i + row) % 4] >> (8 * row) & 255];
               return row == 0 ? t : t << (8 * row) | t >> (32 - 8 * row);
             };
             return part(0) ^ part(1) ^ part(2) ^ part(3);
           });
  }
  static QSGD_CALLED I aes_last(I a, I key) {
    return key ^ each<I>([&](int i) {
             uint32_t word = 0;
             for (int row = 0; row < 4; ++row) {
               word |= uint32_t{kAesBox[a[(i + row) % 4] >> (8 * row) & 255]} << (8 * row);
             }
             return word;
           });
  }

 private:
  using Signed = int32_t __attribute__((vector_size(16)));
  static QSGD_INLINE Signed as_signed(I a) { return reinterpret_cast<Signed>(a); }
};

namespace {

constexpr Kernels kScalar = make_kernels<Scalar>("scalar");

}  // namespace

const Kernels* scalar_kernels() { return &kScalar; }

}  // namespace qsgd
