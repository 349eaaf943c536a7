// Sixteen lanes: AVX-512 F, BW and VL with vector AES.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/clones.h"

namespace qsgd {

struct Avx512 {
  static constexpr int kLanes = 16;
  using F = __m512;
  using I = __m512i;
  using D = __m512d;

  static QSGD_INLINE F load(const float* x) { return _mm512_loadu_ps(x); }
  static QSGD_INLINE void store(float* to, F a) { _mm512_storeu_ps(to, a); }
  static QSGD_INLINE F spread(float x) { return _mm512_set1_ps(x); }
  static QSGD_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static QSGD_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static QSGD_INLINE I bits(F a) { return _mm512_castps_si512(a); }
  static QSGD_INLINE I round(F a) {
    return _mm512_cvt_roundps_epi32(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static QSGD_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }

  static QSGD_INLINE I load_ints(const void* from) { return _mm512_loadu_si512(from); }
  static QSGD_INLINE void store_ints(void* to, I a) { _mm512_storeu_si512(to, a); }
  static QSGD_INLINE I spread(int32_t x) { return _mm512_set1_epi32(x); }
  static QSGD_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static QSGD_INLINE I times(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static QSGD_INLINE I both(I a, I b) { return _mm512_and_si512(a, b); }
  static QSGD_INLINE I differ(I a, I b) { return _mm512_xor_si512(a, b); }
  static QSGD_INLINE I max(I a, I b) { return _mm512_max_epu32(a, b); }
  template <int Bits>
  static QSGD_INLINE I down(I a) {
    return _mm512_srli_epi32(a, Bits);
  }
  template <int Bits>
  static QSGD_INLINE I down_signed(I a) {
    return _mm512_srai_epi32(a, Bits);
  }

  static QSGD_INLINE void narrow(const I* numbers, int offset, uint8_t* code) {
    const auto level = [&](int i) { return _mm512_srai_epi32(numbers[i], 16); };
    const I low = _mm512_packs_epi32(level(0), level(1));
    const I high = _mm512_packs_epi32(level(2), level(3));
    // The packs work within 128 bits; this brings their pieces in order.
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
    const I shift = _mm512_set1_epi8(static_cast<char>(offset));
    _mm512_storeu_si512(code, _mm512_add_epi8(bytes, shift));
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

  static QSGD_INLINE I spread128(uint64_t low, uint64_t high) {
    const auto l = static_cast<int64_t>(low), h = static_cast<int64_t>(high);
    return _mm512_setr_epi64(l, h, l, h, l, h, l, h);
  }
  // Four numbers from this one on, counted in their lower half.
  static QSGD_INLINE I count128(uint64_t low, uint64_t high) {
    return _mm512_add_epi64(spread128(low, high), _mm512_setr_epi64(0, 0, 1, 0, 2, 0, 3, 0));
  }
  static QSGD_INLINE I aes_round(I a, I key) { return _mm512_aesenc_epi128(a, key); }
  static QSGD_INLINE I aes_last(I a, I key) { return _mm512_aesenclast_epi128(a, key); }
};

}  // namespace qsgd
