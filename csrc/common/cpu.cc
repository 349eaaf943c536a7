#include "common/cpu.h"

#include <cstdint>

#if defined(__x86_64__)

#include <cpuid.h>

namespace qsgd {
namespace {

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf) {
  Registers r;
  if (!__get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

constexpr uint32_t bits() { return 0; }
template <class... More>
constexpr uint32_t bits(int first, More... more) {
  return (uint32_t{1} << first) | bits(more...);
}

bool all(uint32_t found, uint32_t needed) { return (found & needed) == needed; }

// Registers saved by the operating system: 256 bits; 512 bits with their masks.
constexpr uint32_t kYmm = bits(1, 2), kZmm = kYmm | bits(5, 6, 7);

bool saves(uint32_t registers) {
  if (!all(cpuid(1).ecx, bits(27))) return false;  // OSXSAVE: XGETBV exists
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return all(low, registers);
}

}  // namespace

bool has_avx2() {
  return saves(kYmm) && all(cpuid(1).ecx, bits(12, 25, 28, 29)) &&  // FMA, AES, AVX, F16C
         all(cpuid(7).ebx, bits(5));                                // AVX2
}

bool has_avx512() {
  const Registers r = cpuid(7);
  return has_avx2() && saves(kZmm) && all(r.ebx, bits(16, 30, 31)) &&  // F, BW, VL
         all(r.ecx, bits(1, 9));                                       // VBMI, VAES
}

bool has_neon() { return false; }

}  // namespace qsgd

#if defined(__clang__)
// Clang's function clones (clones.h) query the compiler's library for the CPU's features. In
// ziglang's library that table is empty, so it is replaced here: levels 3 and 4 of x86-64 are all
// that the clones query. Runs while libraries are being loaded, and calls nothing outside this
// file.
extern "C" {
#define QSGD_HIDDEN __attribute__((visibility("hidden")))
QSGD_HIDDEN uint32_t __cpu_features2[4] = {};
QSGD_HIDDEN int __cpu_indicator_init() {
  using namespace qsgd;
  constexpr int kLevel3 = 97 - 32, kLevel4 = 98 - 32;           // continues the 32 bits of another
  const bool v3 = has_avx2() && all(cpuid(1).ecx, bits(22)) &&  // MOVBE
                  all(cpuid(7).ebx, bits(3, 8)) &&              // BMI 1 and 2
                  all(cpuid(0x80000001).ecx, bits(5));          // LZCNT
  const bool v4 =
      v3 && saves(kZmm) && all(cpuid(7).ebx, bits(16, 17, 28, 30, 31));  // F DQ CD BW VL
  __cpu_features2[2] = uint32_t{v3} << (kLevel3 % 32) | uint32_t{v4} << (kLevel4 % 32);
  return 0;
}
}
#endif

#elif defined(__aarch64__) && defined(__linux__)

#include <asm/hwcap.h>
#include <sys/auxv.h>

namespace qsgd {
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_neon() { return getauxval(AT_HWCAP) & HWCAP_AES; }
}  // namespace qsgd

#else

namespace qsgd {
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_neon() { return false; }
}  // namespace qsgd

#endif
