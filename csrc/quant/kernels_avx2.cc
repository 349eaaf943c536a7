#include "quant/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/dtype.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,aes")
#include "quant/kernel_loops.h"
#include "quant/simd_avx2.h"

namespace qsgd {
namespace {

constexpr Kernels kAvx2 = make_kernels<Avx2>("avx2");

}  // namespace
}  // namespace qsgd
#pragma GCC pop_options

namespace qsgd {

const Kernels* avx2_kernels() {
  const bool runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("aes");
  return runs ? &kAvx2 : nullptr;
}

}  // namespace qsgd

#else

namespace qsgd {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace qsgd

#endif
