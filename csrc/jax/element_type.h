// How the element types of XLA travel.
#pragma once

#include "common/dtype.h"
#include "engine/operation.h"
#include "jax/xla_ffi.h"

namespace qsgd::xla {

// One buffer as the engine is to see it.
struct Travelling {
  DType dtype;
  std::vector<int64_t> shape;
  // Integers that the engine has no arithmetic for, or whose sum could wrap before it is divided,
  // are copied into int64 and back.
  bool widened = false;
};

// Throws a usage error for a type that the operation cannot be carried out on.
Travelling travelling(const Buffer& buffer, const Operation& operation);

// Copy between elements of `type`, which a Travelling says to widen, and int64.
void widen(int32_t type, const void* from, size_t count, int64_t* to);
void narrow(int32_t type, const int64_t* from, size_t count, void* to);

}  // namespace qsgd::xla
