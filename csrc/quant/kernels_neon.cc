#include "quant/kernels.h"

#if defined(__aarch64__) && defined(__linux__) && defined(__GNUC__)

#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/cpu.h"
#include "common/dtype.h"

QSGD_BEGIN_TARGET("+crypto")
#include "quant/kernel_loops.h"

namespace qsgd {

// Four lanes: ARMv8 with its AES instructions.
struct Neon {
  static constexpr int kLanes = 4;
  using F = float32x4_t;
  using I = uint32x4_t;
  using D = float64x2_t;

  static QSGD_INLINE F load(const float* x) { return vld1q_f32(x); }
  static QSGD_INLINE void store(float* to, F a) { vst1q_f32(to, a); }
  static QSGD_INLINE F load(const Float16* x) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const uint8_t*>(x))));
  }
  static QSGD_INLINE F load(const BFloat16* x) {
    const uint8x8_t half = vld1_u8(reinterpret_cast<const uint8_t*>(x));
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(half), 16));
  }
  static QSGD_INLINE void store(Float16* to, F a) {
    vst1_u8(reinterpret_cast<uint8_t*>(to), vreinterpret_u8_f16(vcvt_f16_f32(a)));
  }
  static QSGD_INLINE void store(BFloat16* to, F a) {
    const I odd = both(down<16>(bits(a)), spread(1));
    const I rounded = add(add(bits(a), spread(0x7fff)), odd);
    const I quiet = vorrq_u32(bits(a), spread(0x400000));
    const I all = vbslq_u32(vceqq_f32(a, a), rounded, quiet);
    vst1_u8(reinterpret_cast<uint8_t*>(to), vreinterpret_u8_u16(vshrn_n_u32(all, 16)));
  }
  static QSGD_INLINE F spread(float x) { return vdupq_n_f32(x); }
  static QSGD_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
  static QSGD_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
  static QSGD_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
  static QSGD_INLINE I bits(F a) { return vreinterpretq_u32_f32(a); }
  static QSGD_INLINE F of_bits(I a) { return vreinterpretq_f32_u32(a); }
  static QSGD_INLINE I round(F a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
  static QSGD_INLINE F to_float(I a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }

  static QSGD_INLINE I load_ints(const void* from) {
    return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(from)));
  }
  static QSGD_INLINE void store_ints(void* to, I a) {
    vst1q_u8(static_cast<uint8_t*>(to), vreinterpretq_u8_u32(a));
  }
  static QSGD_INLINE I spread(int32_t x) { return vdupq_n_u32(static_cast<uint32_t>(x)); }
  static QSGD_INLINE I add(I a, I b) { return vaddq_u32(a, b); }
  static QSGD_INLINE I times(I a, I b) { return vmulq_u32(a, b); }
  static QSGD_INLINE I both(I a, I b) { return vandq_u32(a, b); }
  static QSGD_INLINE I differ(I a, I b) { return veorq_u32(a, b); }
  static QSGD_INLINE I max(I a, I b) { return vmaxq_u32(a, b); }
  static QSGD_INLINE I min(I a, I b) { return vminq_u32(a, b); }
  static QSGD_INLINE uint32_t largest(I a) { return vmaxvq_u32(a); }
  template <int Bits>
  static QSGD_INLINE I down(I a) {
    return vshrq_n_u32(a, Bits);
  }
  template <int Bits>
  static QSGD_INLINE I down_signed(I a) {
    return vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(a), Bits));
  }

  template <int Bits>
  static QSGD_INLINE I up(I a) {
    return vshlq_n_u32(a, Bits);
  }
  static QSGD_INLINE I up(I a, int bits) { return vshlq_u32(a, vdupq_n_s32(bits)); }

  // See kernels_avx512.cc.
  static QSGD_INLINE F flip(F x, I signs) {
    return of_bits(differ(bits(x), both(signs, spread(INT32_MIN))));
  }
  template <int Distance>
  static QSGD_INLINE F cross(F x) {
    constexpr uint64_t kMinus = 0x80000000u;
    if constexpr (Distance == 1) {
      const I turn = vreinterpretq_u32_u64(vdupq_n_u64(kMinus << 32));
      return vaddq_f32(vrev64q_f32(x), flip(x, turn));
    } else {
      const I turn = vcombine_u32(vdup_n_u32(0), vdup_n_u32(kMinus));
      return vaddq_f32(vextq_f32(x, x, 2), flip(x, turn));
    }
  }
  static QSGD_INLINE I count_above(I count, I a, I b) { return vsubq_u32(count, vcgtq_u32(a, b)); }
  static QSGD_INLINE I select(I mask, I a, I b) { return vbslq_u32(mask, a, b); }
  static constexpr int kLookup = 256;
  static constexpr bool kLooksUpBytes = false;
  template <int Size>
  static QSGD_INLINE I lookup(const uint32_t* table, I index) {
    const auto entry = [&](uint32_t i) { return table[i % Size]; };
    const uint32_t found[4] = {entry(vgetq_lane_u32(index, 0)), entry(vgetq_lane_u32(index, 1)),
                               entry(vgetq_lane_u32(index, 2)), entry(vgetq_lane_u32(index, 3))};
    return vld1q_u32(found);
  }

  static QSGD_INLINE void narrow(const I* numbers, int offset, uint8_t* code) {
    const uint8x16_t shift = vdupq_n_u8(static_cast<uint8_t>(offset));
    for (int quarter = 0; quarter < 4; ++quarter) {
      const auto level = [&](int i) { return vshrn_n_u32(numbers[4 * quarter + i], 16); };
      const uint8x8_t low = vmovn_u16(vcombine_u16(level(0), level(1)));
      const uint8x8_t high = vmovn_u16(vcombine_u16(level(2), level(3)));
      vst1q_u8(code + 16 * quarter, vaddq_u8(vcombine_u8(low, high), shift));
    }
  }
  static constexpr bool kPacksCodes = false;
  static constexpr bool kPacks = false;
  static QSGD_INLINE I widen(const uint8_t* code) {
    uint32_t four;
    std::memcpy(&four, code, sizeof four);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
  }

  static QSGD_INLINE D zeros() { return vdupq_n_f64(0); }
  static QSGD_INLINE D load_squares(const float* x, D sum) {
    const D wide = vcvt_f64_f32(vld1_f32(x));
    return vaddq_f64(sum, vmulq_f64(wide, wide));
  }
  static QSGD_INLINE void store(double* to, D a) { vst1q_f64(to, a); }

  using Blocks = I;  // of AES, one of 128 bits
  static QSGD_INLINE I ints(Blocks a) { return a; }
  static QSGD_INLINE I spread128(uint64_t low, uint64_t high) {
    return vreinterpretq_u32_u64(vcombine_u64(vcreate_u64(low), vcreate_u64(high)));
  }
  static QSGD_INLINE I count128(uint64_t low, uint64_t high) { return spread128(low, high); }
  static QSGD_INLINE I later128(I number, uint64_t by) {
    const uint64x2_t step = vcombine_u64(vcreate_u64(by), vcreate_u64(0));
    return vreinterpretq_u32_u64(vaddq_u64(vreinterpretq_u64_u32(number), step));
  }
  // ARM adds the key before the round, x86 after it: use a zero key, then add ours.
  static QSGD_INLINE I aes_round(I a, I key) {
    return veorq_u32(vreinterpretq_u32_u8(vaesmcq_u8(last(a))), key);
  }
  static QSGD_INLINE I aes_last(I a, I key) {
    return veorq_u32(vreinterpretq_u32_u8(last(a)), key);
  }

 private:
  static QSGD_INLINE uint8x16_t last(I a) {
    return vaeseq_u8(vreinterpretq_u8_u32(a), vdupq_n_u8(0));
  }
};

namespace {

constexpr Kernels kNeon = make_kernels<Neon>("neon");

}  // namespace
}  // namespace qsgd
QSGD_END_TARGET

namespace qsgd {

const Kernels* neon_kernels() { return has_neon() ? &kNeon : nullptr; }

}  // namespace qsgd

#else

namespace qsgd {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace qsgd

#endif
