#include "quant/convert.h"

#include "common/error.h"
#include "quant/casts.h"

namespace qsgd {
namespace {

CodecSpec cast_to(DType dtype) {
  CodecSpec spec;
  spec.scheme = dtype == DType::kFloat16 ? Scheme::kFloat16 : Scheme::kBFloat16;
  return spec;
}

bool all_finite16(const uint16_t* x, size_t count, uint16_t exponent) {
  bool finite = true;
  for (size_t i = 0; i < count; ++i) finite &= (x[i] & exponent) != exponent;
  return finite;
}

[[noreturn]] void refuse(DType dtype) {
  throw usage_error(std::string(facts(dtype).name) +
                    " elements cannot be coded; use float16, bfloat16, float32 or float64");
}

}  // namespace

void float32_from(const void* x, DType dtype, size_t count, float* out) {
  if (dtype == DType::kFloat64) {
    const auto* in = static_cast<const double*>(x);
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
  } else if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) {
    cast_decode(static_cast<const uint8_t*>(x), count, cast_to(dtype), out);
  } else {
    refuse(dtype);
  }
}

bool float32_to(const float* x, size_t count, DType dtype, void* out) {
  if (dtype == DType::kFloat64) {
    auto* to = static_cast<double*>(out);
    for (size_t i = 0; i < count; ++i) to[i] = double{x[i]};
    return true;
  }
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) refuse(dtype);
  cast_encode(x, count, cast_to(dtype), static_cast<uint8_t*>(out));
  return all_finite16(static_cast<const uint16_t*>(out), count,
                      dtype == DType::kFloat16 ? 0x7c00 : 0x7f80);
}

}  // namespace qsgd
