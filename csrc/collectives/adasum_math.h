// The arithmetic of Adasum on runs of elements.
#pragma once

#include <cstddef>

#include "common/dtype.h"

namespace qsgd {

struct Dots {
  double ab = 0;
  double aa = 0;
  double bb = 0;
  Dots& operator+=(const Dots& o) {
    ab += o.ab;
    aa += o.aa;
    bb += o.bb;
    return *this;
  }
};

// Factors of a and b in their Adasum. A zero vector has no effect.
struct Factors {
  double a;
  double b;
};
Factors adasum_factors(const Dots& dots);

// Dot products of floating elements, summed in an order that depends only on `count`.
Dots dots_of(const void* a, const void* b, DType dtype, size_t count);

// own[i] = by_own * own[i] + by_other * other[i]; 16-bit floats are rounded once, at the end.
void combine(void* own, double by_own, const void* other, double by_other, DType dtype,
             size_t count);

}  // namespace qsgd
