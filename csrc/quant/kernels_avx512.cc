#include "quant/kernels.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/dtype.h"

// GCC 12 warns of the undefined operands inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vbmi,avx2,fma,f16c,aes,vaes")
#include "quant/kernel_loops.h"
#include "quant/simd_avx512.h"

namespace qsgd {
namespace {

constexpr Kernels kAvx512 = make_kernels<Avx512>("avx512");

}  // namespace
}  // namespace qsgd
#pragma GCC pop_options

namespace qsgd {

const Kernels* avx512_kernels() {
  const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
                    __builtin_cpu_supports("vaes");
  return runs ? &kAvx512 : nullptr;
}

}  // namespace qsgd

#else

namespace qsgd {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace qsgd

#endif
