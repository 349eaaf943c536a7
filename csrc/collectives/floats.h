// Conversion of typed elements to float32, and arithmetic on these, block by block.
#pragma once

#include <cstddef>

#include "common/dtype.h"

namespace qsgd {

// to[i] = x[i], for the floating types; values beyond float32 become Inf.
void to_floats(const void* x, DType dtype, size_t count, float* to);

// x[i] = from[i]. Returns whether all results are finite.
bool from_floats(const float* from, size_t count, DType dtype, void* x);

void add_floats(const float* x, size_t count, float* sum);
void scale_floats(float by, size_t count, float* x);

// Of finite values: squared error and squared magnitude.
struct Quality {
  double error = 0;
  double energy = 0;
  Quality& operator+=(const Quality& o) {
    error += o.error;
    energy += o.energy;
    return *this;
  }
};
Quality compare(const float* value, const float* sent, size_t count);

}  // namespace qsgd
