// All codes, each with its C++ name and its name in settings and messages. Their order defines
// their numbers on the wire: append only. The file X.cc of a code defines X_code(); see Code.
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
