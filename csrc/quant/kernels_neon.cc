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
#include "quant/simd_neon.h"

namespace qsgd {
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
