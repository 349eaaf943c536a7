#include "quant/casts.h"

#include "quant/kernels.h"

namespace qsgd {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;

}  // namespace

bool cast_encode(const float* x, size_t count, const CodecSpec& spec, uint8_t* codes) {
  return kernels().shorten[spec.scheme == Scheme::kBFloat16](x, count, codes) < kInfinity;
}

bool cast_decode(const uint8_t* codes, size_t count, const CodecSpec& spec, float* out) {
  return kernels().widen[spec.scheme == Scheme::kBFloat16](codes, count, out) < kInfinity;
}

}  // namespace qsgd
