// Conversion of XLA's element types for the engine.
#pragma once

#include "common/dtype.h"
#include "engine/operation.h"
#include "jax/xla_ffi.h"

namespace qsgd::xla {

// Copies between elements of an integer type and int64.
struct Widening {
  void (*widen)(const void* from, size_t count, int64_t* to);
  void (*narrow)(const int64_t* from, size_t count, void* to);
};

// A buffer as the engine handles it.
struct Conversion {
  DType dtype;
  std::vector<int64_t> shape;
  // If it is copied to int64 and back: integers without arithmetic in the engine, or whose sum
  // could overflow before the division. Else null.
  const Widening* widening = nullptr;
};

// Throws a usage error if the operation does not support the type.
Conversion conversion(const Buffer& buffer, const Operation& operation);

}  // namespace qsgd::xla
