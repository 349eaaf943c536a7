// Copying and scaling of tensors, as in scale_copy(), with a check for NaN and Inf.
#pragma once

#include <type_traits>

#include "common/dtype.h"
#include "gpu/codec.h"
#include "gpu/runtime.h"

namespace qsgd::gpu {

constexpr unsigned kScaleThreads = 256;

// Whether it is neither NaN nor Inf; true for every integer.
template <class T>
__device__ __forceinline__ bool is_number(T value) {
  return value - value == 0;
}

template <class T>
__device__ __forceinline__ T scaled(T value, double factor, int divisor) {
  if constexpr (std::is_integral_v<T>) {
    const T part = static_cast<T>(value / static_cast<int64_t>(divisor));
    return factor == 1 ? part : static_cast<T>(static_cast<double>(part) * factor);
  } else {
    using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const auto by = static_cast<Wide>(factor / divisor);
    return by == 1 ? value : static_cast<T>(static_cast<Wide>(value) * by);
  }
}

// A thread block handles kScaled elements of a span.
template <class T>
__global__ void __launch_bounds__(kScaleThreads)
    scale_kernel(const Spans spans, double factor, int divisor, uint32_t* nonfinite) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  uint32_t low = 0, high = spans.size;  // the block's span is one of [low, high)
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (spans.list[middle].first_block <= blockIdx.x ? low : high) = middle;
  }
  const Span& span = spans.list[low];
  const auto* const from = reinterpret_cast<const T*>(span.from);
  auto* const to = reinterpret_cast<T*>(span.to);
  const uint64_t begin = (blockIdx.x - span.first_block) * kScaled;
  const uint64_t left = span.count - begin;
  const uint64_t end = begin + (left < kScaled ? left : kScaled);
  bool all = true;
  for (uint64_t i = begin + threadIdx.x; i < end; i += kScaleThreads) {
    const T value = scaled(from[i], factor, divisor);
    if (to != nullptr) to[i] = value;
    if constexpr (!std::is_integral_v<T>) all = all && is_number(static_cast<Wide>(value));
  }
  if (!all && nonfinite != nullptr) nonfinite[low] = 1;
}

inline const char* scale(const Spans& spans, DType dtype, double factor, int divisor,
                         uint32_t* nonfinite, Stream stream) {
  if (spans.blocks == 0) return nullptr;
  return dispatch(dtype, [&](auto zero) {
    launch(scale_kernel<decltype(zero)>, spans.blocks, kScaleThreads, stream, spans, factor,
           divisor, nonfinite);
    return last_error();
  });
}

}  // namespace qsgd::gpu
