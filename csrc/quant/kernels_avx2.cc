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
#include "quant/simd_avx2.h"

namespace qsgd {
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
