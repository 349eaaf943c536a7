#include "quant/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/cpu.h"
#include "common/dtype.h"

// GCC 12 warns of undefined operands in its own intrinsics (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
QSGD_BEGIN_TARGET("avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c,aes,vaes")
#include "quant/kernel_loops.h"

namespace qsgd {

// Sixteen lanes: AVX-512 F, BW, VL and VBMI with vector AES.
struct Avx512 {
  static constexpr int kLanes = 16;
  using F = __m512;
  using I = __m512i;
  using D = __m512d;

  static QSGD_INLINE F load(const float* x) { return _mm512_loadu_ps(x); }
  static QSGD_INLINE void store(float* to, F a) { _mm512_storeu_ps(to, a); }
  static QSGD_INLINE F load(const Float16* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  static QSGD_INLINE F load(const BFloat16* x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static QSGD_INLINE void store(Float16* to, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static QSGD_INLINE void store(BFloat16* to, F a) {
    const I odd = both(down<16>(bits(a)), spread(1));
    const I rounded = add(add(bits(a), spread(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const I quiet = _mm512_or_si512(bits(a), spread(0x400000));
    const I all = down<16>(_mm512_mask_mov_epi32(rounded, nan, quiet));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(all));
  }
  static QSGD_INLINE F spread(float x) { return _mm512_set1_ps(x); }
  static QSGD_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static QSGD_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static QSGD_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static QSGD_INLINE I bits(F a) { return _mm512_castps_si512(a); }
  static QSGD_INLINE F of_bits(I a) { return _mm512_castsi512_ps(a); }
  static QSGD_INLINE I round(F a) {
    return _mm512_cvt_roundps_epi32(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static QSGD_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }

  static QSGD_INLINE I load_ints(const void* from) { return _mm512_loadu_si512(from); }
  static QSGD_INLINE void store_ints(void* to, I a) { _mm512_storeu_si512(to, a); }
  static QSGD_INLINE I spread(int32_t x) { return _mm512_set1_epi32(x); }
  static QSGD_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static QSGD_INLINE I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static QSGD_INLINE I times(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static QSGD_INLINE I both(I a, I b) { return _mm512_and_si512(a, b); }
  static QSGD_INLINE I differ(I a, I b) { return _mm512_xor_si512(a, b); }
  static QSGD_INLINE I either(I a, I b) { return _mm512_or_si512(a, b); }
  static QSGD_INLINE I max(I a, I b) { return _mm512_max_epu32(a, b); }
  static QSGD_INLINE I min(I a, I b) { return _mm512_min_epu32(a, b); }
  static QSGD_INLINE uint32_t largest(I a) { return _mm512_reduce_max_epu32(a); }
  template <int Bits>
  static QSGD_INLINE I down(I a) {
    return _mm512_srli_epi32(a, Bits);
  }
  template <int Bits>
  static QSGD_INLINE I down_signed(I a) {
    return _mm512_srai_epi32(a, Bits);
  }

  template <int Bits>
  static QSGD_INLINE I up(I a) {
    return _mm512_slli_epi32(a, Bits);
  }
  static QSGD_INLINE I up(I a, int bits) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(bits)); }

  // x with inverted sign where the highest bit of `signs` is set.
  static QSGD_INLINE F flip(F x, I signs) {
    return of_bits(_mm512_ternarylogic_epi32(bits(x), signs, spread(INT32_MIN), 0x78));
  }
  // With y the element `Distance` lanes away: x + y, and y - x in the upper lane of each pair. The
  // product is exact, so this rounds once, like the sum.
  template <int Distance>
  static QSGD_INLINE F cross(F x) {
    constexpr auto kTurn = [](int lane) { return lane & Distance ? -1.0f : 1.0f; };
    const F turn = _mm512_setr_ps(kTurn(0), kTurn(1), kTurn(2), kTurn(3), kTurn(4), kTurn(5),
                                  kTurn(6), kTurn(7), kTurn(8), kTurn(9), kTurn(10), kTurn(11),
                                  kTurn(12), kTurn(13), kTurn(14), kTurn(15));
    F y;
    if constexpr (Distance == 1) y = _mm512_permute_ps(x, 0xb1);
    if constexpr (Distance == 2) y = _mm512_permute_ps(x, 0x4e);
    if constexpr (Distance == 4) y = _mm512_shuffle_f32x4(x, x, 0xb1);
    if constexpr (Distance == 8) y = _mm512_shuffle_f32x4(x, x, 0x4e);
    return _mm512_fmadd_ps(x, turn, y);
  }
  // `count`, plus one where a > b; both are below 2^31.
  static QSGD_INLINE I count_above(I count, I a, I b) {
    return _mm512_mask_add_epi32(count, _mm512_cmpgt_epi32_mask(a, b), count, spread(1));
  }
  // a where the mask's bits are set, else b.
  static QSGD_INLINE I select(I mask, I a, I b) {
    return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
  }
  static constexpr int kLookup = 32;  // entries that take one instruction
  // Entries of an aligned table of at least 16 entries, by the lowest bytes of indices, which are
  // below Size.
  template <int Size>
  static QSGD_INLINE I lookup(const uint32_t* table, I index) {
    if constexpr (Size <= 16) {
      return _mm512_permutexvar_epi32(index, load_ints(table));
    } else if constexpr (Size == 32) {
      return _mm512_permutex2var_epi32(load_ints(table), index, load_ints(table + 16));
    } else {  // half the instructions of a gather
      const __mmask16 upper = _mm512_test_epi32_mask(index, spread(Size / 2));
      return _mm512_mask_blend_epi32(upper, lookup<Size / 2>(table, index),
                                     lookup<Size / 2>(table + Size / 2, index));
    }
  }

  // Larger tables are searched byte by byte: one or two instructions for each byte of a tile's
  // entries. The bytes of a tile's numbers are then in lane order, in which packing and unpacking
  // leave them: byte 16 q + 4 v + i is that of element 16 v + 4 q + i.
  static constexpr bool kLooksUpBytes = true;
  // The numbers as bytes in lane order, at least -128 and at most Most, 127 or 255.
  template <int Most = 127>
  static QSGD_INLINE I saturated(const I* numbers) {
    const I lower = _mm512_packs_epi32(numbers[0], numbers[1]);
    const I upper = _mm512_packs_epi32(numbers[2], numbers[3]);
    return Most == 127 ? _mm512_packs_epi16(lower, upper) : _mm512_packus_epi16(lower, upper);
  }
  // From lane order to that of the elements, or back.
  static QSGD_INLINE I reorder(I bytes) {
    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
  }
  // `bytes`, plus one where the highest bit of `more` is set.
  static QSGD_INLINE I count_signs(I bytes, I more) {
    return _mm512_mask_add_epi8(bytes, _mm512_movepi8_mask(more), bytes, _mm512_set1_epi8(1));
  }
  static QSGD_INLINE bool has_byte(I bytes, int value) {
    return _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(static_cast<char>(value))) != 0;
  }
  // A tile's entries by indices in lane order, modulo Size; table[k] has byte k of the entries.
  // Returns the entries' lowest bytes in lane order.
  template <int Size, int Length>
  static QSGD_INLINE I lookup_bytes(const uint8_t (&table)[4][Length], I index, I* entries) {
    I byte[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) byte[k] = lookup_byte<Size>(table[k], index);
    const I lower[] = {_mm512_unpacklo_epi8(byte[0], byte[1]),
                       _mm512_unpackhi_epi8(byte[0], byte[1])};
    const I upper[] = {_mm512_unpacklo_epi8(byte[2], byte[3]),
                       _mm512_unpackhi_epi8(byte[2], byte[3])};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      entries[2 * half] = _mm512_unpacklo_epi16(lower[half], upper[half]);
      entries[2 * half + 1] = _mm512_unpackhi_epi16(lower[half], upper[half]);
    }
    return byte[0];
  }

  static QSGD_INLINE I choose(uint32_t mask, I a, I b) {
    return select(spread(static_cast<int32_t>(mask)), a, b);
  }

  // Byte 2 of each number: first collected in the four bytes of each lane, from numbers[0], [2],
  // [1] and [3], which takes the fewest instructions, then permuted to the order of the elements.
  static QSGD_INLINE I bytes(const I* numbers) {
    const I even = choose(0xffff0000u, numbers[1], down<16>(numbers[0]));
    const I odd = choose(0xff000000u, _mm512_slli_epi32(numbers[3], 8), down<8>(numbers[2]));
    // Lane l, byte b of these goes to element 16 * {0, 2, 1, 3}[b] + l.
    const I order =
        _mm512_setr_epi32(0x0c080400, 0x1c181410, 0x2c282420, 0x3c383430, 0x0e0a0602, 0x1e1a1612,
                          0x2e2a2622, 0x3e3a3632, 0x0d090501, 0x1d191511, 0x2d292521, 0x3d393531,
                          0x0f0b0703, 0x1f1b1713, 0x2f2b2723, 0x3f3b3733);
    return _mm512_permutexvar_epi8(order, choose(0x00ff00ffu, even, odd));
  }
  static QSGD_INLINE void narrow(const I* numbers, int offset, uint8_t* code) {
    const I shift = _mm512_set1_epi8(static_cast<char>(offset));
    _mm512_storeu_si512(code, _mm512_add_epi8(bytes(numbers), shift));
  }

  static constexpr bool kPacksCodes = true;  // for any bits, without pack_tile()
  // Packs a tile's codes as pack_tile() does; each is a number below 256.
  template <int Bits>
  static QSGD_INLINE void pack_codes(const I* code_of, uint8_t* out) {
    const I three =
        _mm512_ternarylogic_epi32(code_of[0], up<8>(code_of[1]), up<16>(code_of[2]), 0xfe);
    // Lane l, byte b of these is element 16 b + l.
    const I order =
        _mm512_setr_epi32(0x0c080400, 0x1c181410, 0x2c282420, 0x3c383430, 0x0d090501, 0x1d191511,
                          0x2d292521, 0x3d393531, 0x0e0a0602, 0x1e1a1612, 0x2e2a2622, 0x3e3a3632,
                          0x0f0b0703, 0x1f1b1713, 0x2f2b2723, 0x3f3b3733);
    pack_bytes<Bits>(_mm512_permutexvar_epi8(order, either(three, up<24>(code_of[3]))), out);
  }
  // The same for one byte per code, in the order of the elements.
  template <int Bits>
  static QSGD_INLINE void pack_bytes(I code, uint8_t* out) {
    if constexpr (Bits == 8) _mm512_storeu_si512(out, code);
    if constexpr (Bits >= 4 && Bits < 8) pack_field<4, Bits - 4>(code, out);
    if constexpr ((Bits & 2) != 0) pack_field<2, (Bits & 1)>(code, out + 8 * (Bits & 4));
    if constexpr ((Bits & 1) != 0) pack_field<1, 0>(code, out + 8 * (Bits & 6));
  }
  // The inverse, to one byte per code.
  template <int Bits>
  static QSGD_INLINE void unpack_codes(const uint8_t* in, uint8_t* code) {
    I all = _mm512_setzero_si512();
    if constexpr (Bits == 8) all = load_ints(in);
    if constexpr (Bits >= 4 && Bits < 8) all = unpacked_field<4, Bits - 4>(in);
    if constexpr ((Bits & 2) != 0) {
      all = either(all, unpacked_field<2, (Bits & 1)>(in + 8 * (Bits & 4)));
    }
    if constexpr ((Bits & 1) != 0) all = either(all, unpacked_field<1, 0>(in + 8 * (Bits & 6)));
    _mm512_storeu_si512(code, all);
  }

  static constexpr bool kPacks = true;  // fields of 8, 4 and 2 bits, without pack_tile()
  template <int Bits>
  static QSGD_INLINE void pack(const I* numbers, uint8_t* codes) {
    if constexpr (Bits == 8) {
      narrow(numbers, 127, codes);
    } else {
      const I all = bytes(numbers);
      // Elements from 32 on are a byte's upper half. With the sign bit of each field inverted,
      // level -s becomes 1; less 1, it is the code, and no field borrows from another.
      const __m256i above = _mm256_slli_epi32(_mm512_extracti64x4_epi64(all, 1), 4);
      const __m256i below = _mm512_castsi512_si256(all);
      if constexpr (Bits == 4) {
        const __m256i both = _mm256_ternarylogic_epi32(_mm256_set1_epi8(0x0f), below, above, 0xca);
        const __m256i turned = _mm256_xor_si256(both, _mm256_set1_epi8(char(0x88)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                            _mm256_sub_epi8(turned, _mm256_set1_epi8(0x11)));
      } else {
        const __m256i both = _mm256_ternarylogic_epi32(_mm256_set1_epi8(0x03), below, above, 0xca);
        const __m128i later = _mm_slli_epi32(_mm256_extracti128_si256(both, 1), 2);
        const __m128i four =
            _mm_ternarylogic_epi32(_mm_set1_epi8(0x33), _mm256_castsi256_si128(both), later, 0xca);
        const __m128i turned = _mm_xor_si128(four, _mm_set1_epi8(char(0xaa)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                         _mm_sub_epi8(turned, _mm_set1_epi8(0x55)));
      }
    }
  }
  static QSGD_INLINE I widen(const uint8_t* code) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code)));
  }

  static QSGD_INLINE D zeros() { return _mm512_setzero_pd(); }
  static QSGD_INLINE D load_squares(const float* x, D sum) {
    const D wide = _mm512_cvtps_pd(_mm256_loadu_ps(x));
    return _mm512_add_pd(sum, _mm512_mul_pd(wide, wide));
  }
  static QSGD_INLINE void store(double* to, D a) { _mm512_storeu_pd(to, a); }

  using Blocks = I;  // of AES, four of 128 bits
  static QSGD_INLINE I ints(Blocks a) { return a; }
  static QSGD_INLINE I spread128(uint64_t low, uint64_t high) {
    const auto l = static_cast<int64_t>(low), h = static_cast<int64_t>(high);
    return _mm512_setr_epi64(l, h, l, h, l, h, l, h);
  }
  // Four consecutive numbers, counted in their lower half.
  static QSGD_INLINE I count128(uint64_t low, uint64_t high) {
    return _mm512_add_epi64(spread128(low, high), _mm512_setr_epi64(0, 0, 1, 0, 2, 0, 3, 0));
  }
  static QSGD_INLINE I later128(I numbers, int64_t by) {
    return _mm512_add_epi64(numbers, _mm512_setr_epi64(by, 0, by, 0, by, 0, by, 0));
  }
  static QSGD_INLINE I aes_round(I a, I key) { return _mm512_aesenc_epi128(a, key); }
  static QSGD_INLINE I aes_last(I a, I key) { return _mm512_aesenclast_epi128(a, key); }

 private:
  template <int Size>
  static QSGD_INLINE I lookup_byte(const uint8_t* table, I index) {
    if constexpr (Size == 64) {
      return _mm512_permutexvar_epi8(index, load_ints(table));
    } else if constexpr (Size == 128) {
      return _mm512_permutex2var_epi8(load_ints(table), index, load_ints(table + 64));
    } else {
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), lookup_byte<128>(table, index),
                                    lookup_byte<128>(table + 128, index));
    }
  }
  // Left rotations of a field of Bits bits from Shift on within its eight bytes.
  template <int Bits, int Shift>
  static QSGD_INLINE I turns() {
    constexpr auto kTurn = [](int word) { return word / Bits * Bits - Shift; };
    return _mm512_setr_epi64(kTurn(0), kTurn(1), kTurn(2), kTurn(3), kTurn(4), kTurn(5), kTurn(6),
                             kTurn(7));
  }
  template <int Bits, int Shift>
  static QSGD_INLINE void pack_field(I code, uint8_t* out) {
    const I field = both(code, _mm512_set1_epi8(((1 << Bits) - 1) << Shift));
    if constexpr (Bits == 1) {  // bit w of byte b is that of element 8 w + b
      const I eighths = _mm512_permutexvar_epi8(
          _mm512_setr_epi64(0x3830282018100800, 0x3931292119110901, 0x3a322a221a120a02,
                            0x3b332b231b130b03, 0x3c342c241c140c04, 0x3d352d251d150d05,
                            0x3e362e261e160e06, 0x3f372f271f170f07),
          field);
      const __mmask64 bits = _mm512_test_epi8_mask(eighths, eighths);
      std::memcpy(out, &bits, sizeof bits);
      return;
    }
    const I placed = _mm512_rolv_epi64(field, turns<Bits, Shift>());
    const __m256i four =
        _mm256_or_si256(_mm512_castsi512_si256(placed), _mm512_extracti64x4_epi64(placed, 1));
    if constexpr (Bits == 4) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), four);
    } else {
      _mm_storeu_si128(
          reinterpret_cast<__m128i*>(out),
          _mm_or_si128(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1)));
    }
  }
  template <int Bits, int Shift>
  static QSGD_INLINE I unpacked_field(const uint8_t* in) {
    I field;
    if constexpr (Bits == 4) {
      field = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in)));
    } else if constexpr (Bits == 2) {
      field = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
    } else {
      field = _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
    }
    return both(_mm512_rorv_epi64(field, turns<Bits, Shift>()),
                _mm512_set1_epi8(((1 << Bits) - 1) << Shift));
  }
};

namespace {

constexpr Kernels kAvx512 = make_kernels<Avx512>("avx512");

}  // namespace
}  // namespace qsgd
QSGD_END_TARGET

namespace qsgd {

const Kernels* avx512_kernels() { return has_avx512() ? &kAvx512 : nullptr; }

}  // namespace qsgd

#else

namespace qsgd {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace qsgd

#endif
