#include "quant/convert.h"

#include <cstring>
#include <vector>

#include "common/error.h"
#include "quant/codec.h"
#include "quant/kernels.h"

namespace qsgd {
namespace {

// Beyond these, float32 rounds to Inf: half a unit above the largest number.
constexpr uint32_t kBeyondFloat16 = 0x477ff000u;
constexpr uint32_t kBeyondBFloat16 = 0x7f7f8000u;

[[noreturn]] void refuse_type(DType dtype) {
  throw usage_error(std::string(facts(dtype).name) +
                    " elements cannot be coded; use float16, bfloat16, float32 or float64");
}

}  // namespace

void float32_from(const void* x, DType dtype, size_t count, float* out) {
  if (dtype == DType::kFloat32) {
    if (count > 0) std::memcpy(out, x, count * sizeof(float));
  } else if (dtype == DType::kFloat64) {
    const auto* in = static_cast<const double*>(x);
    for (size_t i = 0; i < count; ++i) out[i] = static_cast<float>(in[i]);
  } else if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) {
    kernels().widen[dtype == DType::kBFloat16](x, count, out);
  } else {
    refuse_type(dtype);
  }
}

bool float32_to(const float* x, size_t count, DType dtype, void* out) {
  if (dtype == DType::kFloat32) {
    if (count > 0) std::memcpy(out, x, count * sizeof(float));
    return all_finite(x, count);
  }
  if (dtype == DType::kFloat64) {
    auto* to = static_cast<double*>(out);
    for (size_t i = 0; i < count; ++i) to[i] = double{x[i]};
    return all_finite(x, count);
  }
  if (dtype != DType::kFloat16 && dtype != DType::kBFloat16) refuse_type(dtype);
  const bool brain = dtype == DType::kBFloat16;
  return kernels().shorten[brain](x, count, out) < (brain ? kBeyondBFloat16 : kBeyondFloat16);
}

uint32_t scale_add(const void* x, DType dtype, size_t count, float by, const float* left, float* to,
                   bool fetch) {
  const int type = kernel_type(dtype);
  if (type >= 0) return kernels().scale_add[type](x, count, by, left, to, fetch);
  std::vector<float> value(count);
  float32_from(x, dtype, count, value.data());
  return kernels().scale_add[kernel_type(DType::kFloat32)](value.data(), count, by, left, to,
                                                           fetch);
}

}  // namespace qsgd
