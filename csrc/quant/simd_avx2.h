// Eight lanes: AVX2 with FMA's machines' AES, one block of 128 bits at a time.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/clones.h"

namespace qsgd {

struct Avx2 {
  static constexpr int kLanes = 8;
  using F = __m256;
  using I = __m256i;
  using D = __m256d;

  static QSGD_INLINE F load(const float* x) { return _mm256_loadu_ps(x); }
  static QSGD_INLINE void store(float* to, F a) { _mm256_storeu_ps(to, a); }
  static QSGD_INLINE F spread(float x) { return _mm256_set1_ps(x); }
  static QSGD_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static QSGD_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
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
  static QSGD_INLINE I max(I a, I b) { return _mm256_max_epu32(a, b); }
  template <int Bits>
  static QSGD_INLINE I down(I a) {
    return _mm256_srli_epi32(a, Bits);
  }
  template <int Bits>
  static QSGD_INLINE I down_signed(I a) {
    return _mm256_srai_epi32(a, Bits);
  }

  static QSGD_INLINE void narrow(const I* numbers, int offset, uint8_t* code) {
    // The packs work within 128 bits; this brings their pieces in order.
    const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const I shift = _mm256_set1_epi8(static_cast<char>(offset));
    for (int half = 0; half < 2; ++half) {
      const auto level = [&](int i) { return _mm256_srai_epi32(numbers[4 * half + i], 16); };
      const I low = _mm256_packs_epi32(level(0), level(1));
      const I high = _mm256_packs_epi32(level(2), level(3));
      const I bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
      store_ints(code + 32 * half, _mm256_add_epi8(bytes, shift));
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

  static QSGD_INLINE I spread128(uint64_t low, uint64_t high) {
    const auto l = static_cast<int64_t>(low), h = static_cast<int64_t>(high);
    return _mm256_setr_epi64x(l, h, l, h);
  }
  // Two numbers from this one on, counted in their lower half.
  static QSGD_INLINE I count128(uint64_t low, uint64_t high) {
    return _mm256_add_epi64(spread128(low, high), _mm256_setr_epi64x(0, 0, 1, 0));
  }
  static QSGD_INLINE I aes_round(I a, I key) {
    return join(_mm_aesenc_si128(low(a), low(key)), _mm_aesenc_si128(high(a), high(key)));
  }
  static QSGD_INLINE I aes_last(I a, I key) {
    return join(_mm_aesenclast_si128(low(a), low(key)), _mm_aesenclast_si128(high(a), high(key)));
  }

 private:
  static QSGD_INLINE __m128i low(I a) { return _mm256_castsi256_si128(a); }
  static QSGD_INLINE __m128i high(I a) { return _mm256_extracti128_si256(a, 1); }
  static QSGD_INLINE I join(__m128i low, __m128i high) { return _mm256_set_m128i(high, low); }
};

}  // namespace qsgd
