// Conversion of all floating types to and from float32.
#pragma once

#include <cstddef>

#include "common/dtype.h"

namespace qsgd {

// Throws a usage error if the type is not floating. A float64 beyond float32 becomes Inf, and thus
// counts as not finite.
void float32_from(const void* x, DType dtype, size_t count, float* out);
// Returns whether all results are finite; finite float32 may overflow to float16 or bfloat16.
bool float32_to(const float* x, size_t count, DType dtype, void* out);

// to[i] = x[i] * by + left[i], rounded to float32 after each step. Returns the largest magnitude,
// as Kernels::max_magnitude does. `to` may be x or left.
// `fetch` prefetches what follows.
uint32_t scale_add(const void* x, DType dtype, size_t count, float by, const float* left, float* to,
                   bool fetch);

}  // namespace qsgd
