// TernGrad: every element becomes -1, 0 or 1 times the bucket's largest magnitude after clipping at
// 2.5 standard deviations. Wen et al., TernGrad, NeurIPS 2017, sections 3 and 4.
#pragma once

#include "quant/codec.h"

namespace qsgd {

bool terngrad_encode(const float* x, size_t count, const CodecSpec& spec, const uint16_t* noise,
                     float* scales, uint8_t* code);
void terngrad_decode(const float* scales, const uint8_t* code, size_t count, float* out);

}  // namespace qsgd
