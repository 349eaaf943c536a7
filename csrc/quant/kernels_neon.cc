#include "quant/kernels.h"

#if defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)

#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/dtype.h"

#pragma GCC push_options
#pragma GCC target("+crypto")
#include "quant/kernel_loops.h"
#include "quant/simd_neon.h"

namespace qsgd {
namespace {

constexpr Kernels kNeon = make_kernels<Neon>("neon");

}  // namespace
}  // namespace qsgd
#pragma GCC pop_options

namespace qsgd {

const Kernels* neon_kernels() { return getauxval(AT_HWCAP) & HWCAP_AES ? &kNeon : nullptr; }

}  // namespace qsgd

#else

namespace qsgd {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace qsgd

#endif
