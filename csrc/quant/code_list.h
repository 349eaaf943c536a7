// All codes, each with its C++ name and the one that settings and messages use. Their order is that
// of the numbers on the wire: append only. Code X is made in X.cc, which defines X_code(); code.h
// says of what it consists.
#pragma once

#define QSGD_CODES(X)    \
  X(kQsgd, qsgd)         \
  X(kMinMax, minmax)     \
  X(kNuqsgd, nuqsgd)     \
  X(kTernGrad, terngrad) \
  X(kSign, sign)         \
  X(kTopK, topk)         \
  X(kFloat16, float16)   \
  X(kBFloat16, bfloat16) \
  X(kElias, elias)       \
  X(kEden, eden)
