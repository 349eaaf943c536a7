#include "quant/kernel_loops.h"
#include "quant/simd_scalar.h"

namespace qsgd {
namespace {

constexpr Kernels kScalar = make_kernels<Scalar>("scalar");

}  // namespace

const Kernels* scalar_kernels() { return &kScalar; }

}  // namespace qsgd
