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
#include "quant/simd_avx512.h"

namespace qsgd {
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
