#include "quant/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/cpu.h"
#include "common/dtype.h"

QSGD_BEGIN_TARGET("avx2,fma,f16c,aes")
#include "quant/kernel_loops.h"

namespace qsgd {

// Eight lanes: AVX2, with the AES instructions of machines with FMA, one block of 128 bits at a
// time.
struct Avx2 {
  static constexpr int kLanes = 8;
  using F = __m256;
  using I = __m256i;
  using D = __m256d;

  static QSGD_INLINE F load(const float* x) { return _mm256_loadu_ps(x); }
  static QSGD_INLINE void store(float* to, F a) { _mm256_storeu_ps(to, a); }
  static QSGD_INLINE F load(const Float16* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  static QSGD_INLINE F load(const BFloat16* x) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static QSGD_INLINE void store(Float16* to, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static QSGD_INLINE void store(BFloat16* to, F a) {
    const I odd = both(down<16>(bits(a)), spread(1));
    const I rounded = add(add(bits(a), spread(0x7fff)), odd);
    const I nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const I quiet = _mm256_or_si256(bits(a), spread(0x400000));
    const I all = down<16>(_mm256_blendv_epi8(rounded, quiet, nan));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low(all), high(all)));
  }
  static QSGD_INLINE F spread(float x) { return _mm256_set1_ps(x); }
  static QSGD_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static QSGD_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  static QSGD_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static QSGD_INLINE I bits(F a) { return _mm256_castps_si256(a); }
  static QSGD_INLINE F of_bits(I a) { return _mm256_castsi256_ps(a); }
  static QSGD_INLINE I round(F a) { return _mm256_cvtps_epi32(a); }
  static QSGD_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }

  static QSGD_INLINE I load_ints(const void* from) {
    return _mm256_loadu_si256(static_cast<const I*>(from));
  }
  static QSGD_INLINE void store_ints(void* to, I a) { _mm256_storeu_si256(static_cast<I*>(to), a); }
  static QSGD_INLINE I spread(int32_t x) { return _mm256_set1_epi32(x); }
  static QSGD_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
  static QSGD_INLINE I times(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static QSGD_INLINE I both(I a, I b) { return _mm256_and_si256(a, b); }
  static QSGD_INLINE I differ(I a, I b) { return _mm256_xor_si256(a, b); }
  static QSGD_INLINE I either(I a, I b) { return _mm256_or_si256(a, b); }
  static QSGD_INLINE I max(I a, I b) { return _mm256_max_epu32(a, b); }
  static QSGD_INLINE I min(I a, I b) { return _mm256_min_epu32(a, b); }
  static QSGD_INLINE uint32_t largest(I a) {
    __m128i most = _mm_max_epu32(low(a), high(a));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
  }
  template <int Bits>
  static QSGD_INLINE I down(I a) {
    return _mm256_srli_epi32(a, Bits);
  }
  template <int Bits>
  static QSGD_INLINE I down_signed(I a) {
    return _mm256_srai_epi32(a, Bits);
  }

  template <int Bits>
  static QSGD_INLINE I up(I a) {
    return _mm256_slli_epi32(a, Bits);
  }
  static QSGD_INLINE I up(I a, int bits) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(bits)); }

  // See kernels_avx512.cc.
  static QSGD_INLINE F flip(F x, I signs) {
    return of_bits(differ(bits(x), both(signs, spread(INT32_MIN))));
  }
  template <int Distance>
  static QSGD_INLINE F cross(F x) {
    constexpr float kSecond = Distance & 1 ? -1 : 1, kThird = Distance & 2 ? -1 : 1;
    constexpr float kFifth = Distance & 4 ? -1 : 1;
    const F turn = _mm256_setr_ps(1, kSecond, kThird, kSecond * kThird, kFifth, kSecond * kFifth,
                                  kThird * kFifth, kSecond * kThird * kFifth);
    F y;
    if constexpr (Distance == 1) y = _mm256_permute_ps(x, 0xb1);
    if constexpr (Distance == 2) y = _mm256_permute_ps(x, 0x4e);
    if constexpr (Distance == 4) y = _mm256_permute2f128_ps(x, x, 1);
    return _mm256_fmadd_ps(x, turn, y);
  }
  static QSGD_INLINE I count_above(I count, I a, I b) {
    return _mm256_sub_epi32(count, _mm256_cmpgt_epi32(a, b));
  }
  static QSGD_INLINE I select(I mask, I a, I b) {
    return either(both(mask, a), _mm256_andnot_si256(mask, b));
  }
  static constexpr int kLookup = 8;
  static constexpr bool kLooksUpBytes = false;
  template <int Size>
  static QSGD_INLINE I lookup(const uint32_t* table, I index) {
    if constexpr (Size <= 8) {
      return _mm256_permutevar8x32_epi32(load_ints(table), index);
    } else if constexpr (Size == 16) {
      const F upper = of_bits(_mm256_slli_epi32(index, 28));  // by the highest bit of each lane
      return bits(_mm256_blendv_ps(
          of_bits(_mm256_permutevar8x32_epi32(load_ints(table), index)),
          of_bits(_mm256_permutevar8x32_epi32(load_ints(table + 8), index)), upper));
    } else {
      const I place = both(index, spread(Size - 1));
      return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), place, 4);
    }
  }

  // Byte 2 of each of 32 numbers.
  static QSGD_INLINE I bytes(const I* numbers) {
    // The pack instructions work within 128 bits; this restores the order.
    const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const auto level = [&](int i) { return _mm256_srai_epi32(numbers[i], 16); };
    const I low = _mm256_packs_epi32(level(0), level(1));
    const I high = _mm256_packs_epi32(level(2), level(3));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  }
  static QSGD_INLINE void narrow(const I* numbers, int offset, uint8_t* code) {
    const I shift = _mm256_set1_epi8(static_cast<char>(offset));
    store_ints(code, _mm256_add_epi8(bytes(numbers), shift));
    store_ints(code + 32, _mm256_add_epi8(bytes(numbers + 4), shift));
  }

  static constexpr bool kPacksCodes = true;
  // See kernels_avx512.cc.
  template <int Bits>
  static QSGD_INLINE void pack_codes(const I* code_of, uint8_t* out) {
    const auto half = [&](int i) {
      const I low = _mm256_packus_epi32(code_of[i], code_of[i + 1]);
      const I high = _mm256_packus_epi32(code_of[i + 2], code_of[i + 3]);
      return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high),
                                         _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    };
    const I codes[2] = {half(0), half(4)};
    if constexpr (Bits == 8) {
      store_ints(out, codes[0]);
      store_ints(out + 32, codes[1]);
    }
    if constexpr (Bits >= 4 && Bits < 8) pack_field<4, Bits - 4>(codes, out);
    if constexpr ((Bits & 2) != 0) pack_field<2, (Bits & 1)>(codes, out + 8 * (Bits & 4));
    if constexpr ((Bits & 1) != 0) pack_field<1, 0>(codes, out + 8 * (Bits & 6));
  }
  template <int Bits>
  static QSGD_INLINE void unpack_codes(const uint8_t* in, uint8_t* code) {
    I all[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if constexpr (Bits == 8) {
      all[0] = load_ints(in);
      all[1] = load_ints(in + 32);
    }
    if constexpr (Bits >= 4 && Bits < 8) unpack_field<4, Bits - 4>(in, all);
    if constexpr ((Bits & 2) != 0) unpack_field<2, (Bits & 1)>(in + 8 * (Bits & 4), all);
    if constexpr ((Bits & 1) != 0) unpack_field<1, 0>(in + 8 * (Bits & 6), all);
    store_ints(code, all[0]);
    store_ints(code + 32, all[1]);
  }

  static constexpr bool kPacks = true;  // fields of 8, 4 and 2 bits, without pack_tile()
  template <int Bits>
  static QSGD_INLINE void pack(const I* numbers, uint8_t* codes) {
    if constexpr (Bits == 8) {
      narrow(numbers, 127, codes);
    } else {
      // Elements from 32 on are a byte's upper half. With the sign bit of each field inverted,
      // level -s becomes 1; less 1, it is the code, and no field borrows from another.
      constexpr char kField = Bits == 4 ? 0x0f : 0x03;
      const I below = both(bytes(numbers), _mm256_set1_epi8(kField));
      const I above = both(bytes(numbers + 4), _mm256_set1_epi8(kField));
      const I paired = _mm256_or_si256(below, _mm256_slli_epi32(above, 4));
      if constexpr (Bits == 4) {
        const I turned = differ(paired, _mm256_set1_epi8(char(0x88)));
        store_ints(codes, _mm256_sub_epi8(turned, _mm256_set1_epi8(0x11)));
      } else {
        const __m128i later = _mm_slli_epi32(high(paired), 2);
        const __m128i turned =
            _mm_xor_si128(_mm_or_si128(low(paired), later), _mm_set1_epi8(char(0xaa)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes),
                         _mm_sub_epi8(turned, _mm_set1_epi8(0x55)));
      }
    }
  }
  static QSGD_INLINE I widen(const uint8_t* code) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(code)));
  }

  static QSGD_INLINE D zeros() { return _mm256_setzero_pd(); }
  static QSGD_INLINE D load_squares(const float* x, D sum) {
    const D wide = _mm256_cvtps_pd(_mm_loadu_ps(x));
    return _mm256_add_pd(sum, _mm256_mul_pd(wide, wide));
  }
  static QSGD_INLINE void store(double* to, D a) { _mm256_storeu_pd(to, a); }

  // Two separate blocks of AES: the instruction processes one, and joining them would cost as much
  // as a round.
  struct Blocks {
    __m128i low, high;
  };
  static QSGD_INLINE I ints(Blocks a) { return _mm256_set_m128i(a.high, a.low); }
  static QSGD_INLINE Blocks spread128(uint64_t low, uint64_t high) {
    const __m128i one = _mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low));
    return {one, one};
  }
  // Two consecutive numbers, counted in their lower half.
  static QSGD_INLINE Blocks count128(uint64_t low, uint64_t high) {
    return {spread128(low, high).low, spread128(low + 1, high).low};
  }
  static QSGD_INLINE Blocks later128(Blocks numbers, int64_t by) {
    const __m128i step = _mm_set_epi64x(0, by);
    return {_mm_add_epi64(numbers.low, step), _mm_add_epi64(numbers.high, step)};
  }
  static QSGD_INLINE Blocks differ(Blocks a, Blocks b) {
    return {_mm_xor_si128(a.low, b.low), _mm_xor_si128(a.high, b.high)};
  }
  static QSGD_INLINE Blocks aes_round(Blocks a, Blocks key) {
    return {_mm_aesenc_si128(a.low, key.low), _mm_aesenc_si128(a.high, key.high)};
  }
  static QSGD_INLINE Blocks aes_last(Blocks a, Blocks key) {
    return {_mm_aesenclast_si128(a.low, key.low), _mm_aesenclast_si128(a.high, key.high)};
  }

 private:
  // Left shifts of a field of Bits bits within its eight bytes, for words 4 `half` to 4 `half` + 3
  // of eight.
  template <int Bits>
  static QSGD_INLINE I turns(int half) {
    const auto turn = [half](int word) -> int64_t { return (4 * half + word) / Bits * Bits; };
    return _mm256_setr_epi64x(turn(0), turn(1), turn(2), turn(3));
  }
  template <int Bits, int Shift>
  static QSGD_INLINE void pack_field(const I* codes, uint8_t* out) {
    const I mask = _mm256_set1_epi8((1 << Bits) - 1);
    const auto placed = [&](int half) {
      const I field = both(_mm256_srli_epi64(codes[half], Shift), mask);
      return _mm256_sllv_epi64(field, turns<Bits>(half));
    };
    const I four = either(placed(0), placed(1));
    if constexpr (Bits == 4) {
      store_ints(out, four);
    } else {
      const __m128i two = _mm_or_si128(low(four), high(four));
      if constexpr (Bits == 2) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), two);
      } else {
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out),
                         _mm_or_si128(two, _mm_unpackhi_epi64(two, two)));
      }
    }
  }
  template <int Bits, int Shift>
  static QSGD_INLINE void unpack_field(const uint8_t* in, I* all) {
    I field;
    if constexpr (Bits == 4) {
      field = load_ints(in);
    } else if constexpr (Bits == 2) {
      field = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
    } else {
      field = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
    }
    const I mask = _mm256_set1_epi8((1 << Bits) - 1);
    for (int half = 0; half < 2; ++half) {
      const I codes = both(_mm256_srlv_epi64(field, turns<Bits>(half)), mask);
      all[half] = either(all[half], _mm256_slli_epi64(codes, Shift));
    }
  }
  static QSGD_INLINE __m128i low(I a) { return _mm256_castsi256_si128(a); }
  static QSGD_INLINE __m128i high(I a) { return _mm256_extracti128_si256(a, 1); }
};

namespace {

constexpr Kernels kAvx2 = make_kernels<Avx2>("avx2");

}  // namespace
}  // namespace qsgd
QSGD_END_TARGET

namespace qsgd {

const Kernels* avx2_kernels() { return has_avx2() ? &kAvx2 : nullptr; }

}  // namespace qsgd

#else

namespace qsgd {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace qsgd

#endif
