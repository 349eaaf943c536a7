// Conversion of XLA's element types for the engine.
#pragma once

#include "common/dtype.h"
#include "engine/operation.h"
#include "jax/xla_ffi.h"

namespace qsgd::xla {

// A buffer as the engine handles it.
struct Conversion {
  DType dtype;
  std::vector<int64_t> shape;
  // Whether it is copied to int64 and back: integers without arithmetic in the engine, or whose sum
  // could overflow before the division.
  bool widened = false;
};

// Throws a usage error if the operation does not support the type.
Conversion conversion(const Buffer& buffer, const Operation& operation);

// Copy between elements of `type`, which is widened, and int64.
void widen(int32_t type, const void* from, size_t count, int64_t* to);
void narrow(int32_t type, const int64_t* from, size_t count, void* to);

}  // namespace qsgd::xla
