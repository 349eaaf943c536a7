// Arithmetic on float32, block by block.
#pragma once

#include <cstddef>

namespace qsgd {

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
