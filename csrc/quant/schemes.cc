#include "quant/schemes.h"

#include <cstring>

#include "common/error.h"
#include "quant/minmax.h"
#include "quant/nuqsgd.h"
#include "quant/sign.h"
#include "quant/terngrad.h"

namespace qsgd {
namespace {

[[noreturn]] void refuse(const CodecSpec& spec) {
  throw internal_error(describe(spec) + " is not a code of one integer per element");
}

}  // namespace

bool scheme_encode(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                   float* scales, uint8_t* code) {
  std::memset(code + count, 0, (kTile - count % kTile) % kTile);
  switch (spec.scheme) {
    case Scheme::kMinMax:
      return minmax_encode(x, count, spec, noise, scales, code);
    case Scheme::kNuqsgd:
      return nuqsgd_encode(x, count, spec, noise, scales, code);
    case Scheme::kTernGrad:
      return terngrad_encode(x, count, spec, noise, scales, code);
    case Scheme::kSign:
      return sign_encode(x, count, scales, code);
    default:
      refuse(spec);
  }
}

void scheme_decode(const float* scales, const uint8_t* code, size_t count, const CodecSpec& spec,
                   float* out) {
  switch (spec.scheme) {
    case Scheme::kMinMax:
      return minmax_decode(scales, code, count, out);
    case Scheme::kNuqsgd:
      return nuqsgd_decode(scales, code, count, spec, out);
    case Scheme::kTernGrad:
      return terngrad_decode(scales, code, count, out);
    case Scheme::kSign:
      return sign_decode(scales, code, count, out);
    default:
      refuse(spec);
  }
}

bool draws(const CodecSpec& spec) {
  return spec.rounding == Rounding::kStochastic &&
         (spec.scheme == Scheme::kMinMax || spec.scheme == Scheme::kNuqsgd ||
          spec.scheme == Scheme::kTernGrad);
}

}  // namespace qsgd
